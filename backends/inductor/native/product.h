// Products with a weight that lies in panels, as compiler/packed_ops.py lays it out: panel p holds columns p * W to
// (p + 1) * W of the weight, row after row, W elements being 128 bytes.
//
// Every element of the result is summed over k in rising order, `kDepth` at a time, however many rows there are: the
// products of one step and of many steps at once give the same bits. Sums are kept in registers, `kRows` rows by two
// vectors of columns (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008).
// Vectors are those of ATen: inductor's cpp_prefix.h, or ATen/cpu/vec/vec.h, is included before.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace reroll {

constexpr int64_t kDepth = 256;  // rows of a panel that are read together: 32 KiB; partial sums keep rounding small
constexpr int64_t kBlocks = 8;  // blocks of rows that go through a panel together
constexpr int64_t kGrain = 1 << 19;  // multiplications from which on threads are worth it

template <class T>
constexpr int64_t kRows = sizeof(at::vec::Vectorized<T>) == 32 ? 6 : 11;  // AVX2 has 16 registers, AVX-512 has 32
template <class T, int64_t M>
constexpr int64_t kBlocksOf = (M + kRows<T> - 1) / kRows<T>;  // blocks of rows, of about equal height

// R rows by `columns` columns, which V vectors hold. `more`: added to what is in out.
template <class T, int R, int V>
inline void tile(const T* x, int64_t x_stride, const T* panel, T* out, int64_t n, int64_t k, int64_t columns, bool more) {
  using Vector = at::vec::Vectorized<T>;
  constexpr int64_t size = Vector::size(), width = 128 / sizeof(T);
  const int64_t last = columns - (V - 1) * size;
  Vector sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sum[r][v] = Vector(T(0));
  for (int64_t i = 0; i < k; i++) {
    Vector row[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) row[v] = Vector::loadu(panel + i * width + v * size);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Vector value(x[r * x_stride + i]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sum[r][v] = at::vec::fmadd(value, row[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      T* to = out + r * n + v * size;
      const bool whole = v + 1 < V || last == size;
      if (more) sum[r][v] = sum[r][v] + (whole ? Vector::loadu(to) : Vector::loadu(to, last));
      if (whole)
        sum[r][v].store(to);
      else
        sum[r][v].store(to, static_cast<int>(last));
    }
}

// R rows by the columns of one panel.
template <class T, int R, int64_t N>
inline void strip(const T* x, int64_t x_stride, const T* panel, T* out, int64_t k, int64_t columns, bool more) {
  constexpr int64_t size = at::vec::Vectorized<T>::size(), width = 128 / sizeof(T);
  constexpr bool even = N % (2 * size) == 0 || N % (2 * size) > size;
  int64_t at = 0;
  for (; columns - at > (even ? 0 : size); at += 2 * size)
    tile<T, R, 2>(x, x_stride, panel + at, out + at, N, k, std::min(columns - at, 2 * size), more);
  if constexpr (!even)
    if (at < columns) tile<T, R, 1>(x, x_stride, panel + at, out + at, N, k, columns - at, more);
  static_assert(width % (2 * size) == 0, "a panel holds pairs of vectors");
}

// The rows of a chunk times one panel, `kDepth` rows of the panel at a time.
template <class T, int64_t M, int64_t N>
inline void chunk(const T* x, int64_t x_stride, const T* panel, T* out, int64_t k, int64_t begin, int64_t end, int64_t columns) {
  constexpr int64_t width = 128 / sizeof(T), rows = M / kBlocksOf<T, M>;
  constexpr int64_t longer = M % kBlocksOf<T, M>;  // so many blocks, the first ones, have one row more
  for (int64_t depth = 0; depth < k; depth += kDepth) {
    const int64_t part = std::min(kDepth, k - depth);
    const T* rows_of_panel = panel + depth * width;
    for (int64_t block = begin; block < end; block++) {
      const int64_t row = block * rows + std::min(block, longer);
      const T* from = x + row * x_stride + depth;
      T* to = out + row * N;
      if (longer && block < longer)
        strip<T, rows + (longer > 0), N>(from, x_stride, rows_of_panel, to, part, columns, depth > 0);
      else
        strip<T, rows, N>(from, x_stride, rows_of_panel, to, part, columns, depth > 0);
    }
  }
}

// out [M, N] = x [M, k] w [k, N]; the rows of x are x_stride elements apart, those of out are N.
template <class T, int64_t M, int64_t N, int Threads>
inline void product(const T* x, int64_t x_stride, const T* panels, T* out, int64_t k) {
  constexpr int64_t width = 128 / sizeof(T), blocks = kBlocksOf<T, M>;
  constexpr int64_t chunks = (blocks + kBlocks - 1) / kBlocks, strips = (N + width - 1) / width;
  const auto work = [=](int64_t item) {
    const int64_t begin = item / strips * kBlocks, column = item % strips * width;
    const int64_t end = std::min(begin + kBlocks, blocks), columns = std::min(N - column, width);
    chunk<T, M, N>(x, x_stride, panels + column * k, out + column, k, begin, end, columns);
  };
  if constexpr (Threads > 1) {
    if (M * N * k >= kGrain) {
#pragma omp parallel for num_threads(Threads)
      for (int64_t item = 0; item < chunks * strips; item++) work(item);
      return;
    }
  }
  for (int64_t item = 0; item < chunks * strips; item++) work(item);
}

}  // namespace reroll
