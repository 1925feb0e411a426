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

// R rows by the columns of one panel. N: columns of the result, 0 where they are only known as n.
template <class T, int R, int64_t N>
inline void strip(const T* x, int64_t x_stride, const T* panel, T* out, int64_t k, int64_t columns, bool more, int64_t n) {
  constexpr int64_t size = at::vec::Vectorized<T>::size(), width = 128 / sizeof(T);
  const int64_t whole = N ? N : n;
  const bool even = whole % (2 * size) == 0 || whole % (2 * size) > size;
  int64_t at = 0;
  for (; columns - at > (even ? 0 : size); at += 2 * size)
    tile<T, R, 2>(x, x_stride, panel + at, out + at, whole, k, std::min(columns - at, 2 * size), more);
  if (!even && at < columns) tile<T, R, 1>(x, x_stride, panel + at, out + at, whole, k, columns - at, more);
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
        strip<T, rows + (longer > 0), N>(from, x_stride, rows_of_panel, to, part, columns, depth > 0, N);
      else
        strip<T, rows, N>(from, x_stride, rows_of_panel, to, part, columns, depth > 0, N);
    }
  }
}

// R rows at a time, and then half of them, down to one: for a number of rows that is not known when this is compiled.
template <class T, int R>
inline void fewer(const T* x, int64_t x_stride, const T* panel, T* out, int64_t k, int64_t columns, bool more, int64_t n, int64_t rows) {
  for (; rows >= R; rows -= R, x += R * x_stride, out += R * n)
    strip<T, R, 0>(x, x_stride, panel, out, k, columns, more, n);
  if constexpr (R > 1) fewer<T, R / 2>(x, x_stride, panel, out, k, columns, more, n, rows);
}

template <class T>
inline void any_chunk(const T* x, int64_t x_stride, const T* panel, T* out, int64_t k, int64_t columns, int64_t n, int64_t rows) {
  constexpr int64_t width = 128 / sizeof(T);
  for (int64_t depth = 0; depth < k; depth += kDepth)
    fewer<T, kRows<T>>(
        x + depth, x_stride, panel + depth * width, out, std::min(kDepth, k - depth), columns, depth > 0, n, rows);
}

// out [m, n] = x [m, k] w [k, n]; the rows of x are x_stride elements apart, those of out are n. M, N: m and n, or 0 where
// m is not known when this is compiled.
template <class T, int64_t M, int64_t N, int Threads>
inline void product(const T* x, int64_t x_stride, const T* panels, T* out, int64_t k, int64_t m, int64_t n) {
  constexpr int64_t width = 128 / sizeof(T);
  const int64_t blocks = M ? kBlocksOf<T, M ? M : 1> : (m + kRows<T> - 1) / kRows<T>;
  const int64_t chunks = (blocks + kBlocks - 1) / kBlocks, strips = (n + width - 1) / width;
  const auto work = [=](int64_t item) {
    const int64_t begin = item / strips * kBlocks, column = item % strips * width;
    const int64_t end = std::min(begin + kBlocks, blocks), columns = std::min(n - column, width);
    if constexpr (M > 0) {
      chunk<T, M, N>(x, x_stride, panels + column * k, out + column, k, begin, end, columns);
    } else {
      const int64_t row = begin * kRows<T>, rows = std::min(m, end * kRows<T>) - row;
      any_chunk<T>(x + row * x_stride, x_stride, panels + column * k, out + row * n + column, k, columns, n, rows);
    }
  };
  if constexpr (Threads > 1) {
    if (m * n * k >= kGrain) {
#pragma omp parallel for num_threads(Threads)
      for (int64_t item = 0; item < chunks * strips; item++) work(item);
      return;
    }
  }
  for (int64_t item = 0; item < chunks * strips; item++) work(item);
}

}  // namespace reroll
