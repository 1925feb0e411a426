// Products of an operand that is mostly zeros with a weight in panels (product.h): rows of the panels are added up at
// the events. Where too many elements are not zero, the product is the dense one; that depends on the operand alone.
//
// A panel is gone through by many rows, one after another, while it lies in the first cache. Every element of the
// result is the sum of two sums, over the even and the odd events of its row, whatever the other rows are. Vectors are
// those of ATen: inductor's cpp_prefix.h, or ATen/cpu/vec/vec.h, is included before.

#pragma once

#include <memory>

#include "events.h"
#include "product.h"

namespace reroll {

constexpr int64_t kTogether = 64;  // rows whose events are listed together
constexpr int64_t kEventGrain = 1 << 17;  // additions from which on threads are worth it

// out[0 : columns] = sum over events of value * row of the panel
template <class T>
inline void add_rows(const int32_t* at, const T* value, int64_t events, const T* panel, T* out, int64_t columns) {
  using Vector = at::vec::Vectorized<T>;
  constexpr int64_t size = Vector::size(), width = 128 / sizeof(T), V = width / size, U = 2;
  Vector sum[U][V];
  for (auto& each : sum)
    for (Vector& part : each) part = Vector(T(0));
  const auto add = [&](int64_t e, Vector* to) {
    const T* row = panel + at[e] * width;
    const Vector scale(value[e]);
#pragma GCC unroll 8
    for (int64_t v = 0; v < V; v++) to[v] = at::vec::fmadd(scale, Vector::loadu(row + v * size), to[v]);
  };
  int64_t e = 0;
  for (; e + U <= events; e += U)
#pragma GCC unroll 2
    for (int64_t u = 0; u < U; u++) add(e + u, sum[u]);
  for (; e < events; e++) add(e, sum[0]);
#pragma GCC unroll 8
  for (int64_t v = 0; v < V; v++) {
    const Vector all = sum[0][v] + sum[1][v];
    if (const int64_t left = columns - v * size; left >= size)
      all.store(out + v * size);
    else if (left > 0)
      all.store(out + v * size, static_cast<int>(left));
  }
}

// The events of some rows: those of row r are at[begin[r]] to at[begin[r + 1]].
template <class T>
struct Events {
  std::unique_ptr<int32_t[]> at;
  std::unique_ptr<T[]> value;
  int64_t begin[kTogether + 1];

  explicit Events(int64_t most) : at(new int32_t[most + 16]), value(new T[most + 16]) {}

  void list(const T* z, int64_t stride, int64_t rows, int64_t count) {
    begin[0] = 0;
    for (int64_t row = 0; row < rows; row++)
      begin[row + 1] = begin[row] + events_of(z + row * stride, count, at.get() + begin[row], value.get() + begin[row]);
  }
};

// out [m, N] = x [m, K] w [K, N]; the rows of x are x_stride elements apart, those of out are N. M: m, or 0 where it is not
// known when this is compiled.
template <class T, int64_t M, int64_t N, int64_t K, int Threads>
inline void event_product(const T* x, int64_t x_stride, const T* panels, int64_t* counts, T* out, double crossover, int64_t m) {
  constexpr int64_t width = 128 / sizeof(T), strips = (N + width - 1) / width;
  const int64_t events = nonzeros(x, x_stride, m, K);
  const bool chosen = static_cast<double>(events) <= crossover * static_cast<double>(m * K);
  count(counts, chosen, m * K, events);
  if (!chosen) return product<T, M, M ? N : 0, Threads>(x, x_stride, panels, out, K, m, N);
  Events<T> found(std::min(events, kTogether * K));
  for (int64_t first = 0; first < m; first += kTogether) {
    const int64_t rows = std::min(kTogether, m - first);
    found.list(x + first * x_stride, x_stride, rows, K);
    const auto strip = [&](int64_t item) {
      const int64_t column = item * width, columns = std::min(N - column, width);
      for (int64_t row = 0; row < rows; row++) {
        const int64_t begin = found.begin[row], listed = found.begin[row + 1] - begin;
        T* to = out + (first + row) * N + column;
        add_rows(found.at.get() + begin, found.value.get() + begin, listed, panels + column * K, to, columns);
      }
    };
    if (Threads > 1 && found.begin[rows] * N >= kEventGrain) {
#pragma omp parallel for num_threads(Threads)
      for (int64_t item = 0; item < strips; item++) strip(item);
    } else {
      for (int64_t item = 0; item < strips; item++) strip(item);
    }
  }
}

}  // namespace reroll
