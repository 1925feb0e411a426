// Products with an operand that is mostly zeros, as spikes are: only rows of the weight at events are read. What the
// operations are is written in compiler/event_ops.py.
//
// Values of the operand are used as they are, so any operand is right. Where too many are not zero, torch's dense
// product is called; that depends on the operand alone, so the same call gives the same bits whenever it is repeated.

#define TORCH_TARGET_VERSION 0x020b000000000000  // 2.11

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "events.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast", "tree-loop-vectorize")
#endif

using reroll::events_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 64, kRegisters = 16;  // bytes of a vector, accumulators
#elif defined(__AVX__)
constexpr int kWidth = 32, kRegisters = 8;
#else
constexpr int kWidth = 16, kRegisters = 8;
#endif

template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(kWidth), aligned(sizeof(T)), may_alias));
};

// out[0 : B * width] = sum over events of value * row[0 : B * width], plus start if there is one.
template <class T, int B>
inline void rows_block(const T* w, int64_t stride, const int32_t* at, const T* value, int64_t events, const T* start, T* out) {
  using V = typename Vector<T>::type;
  constexpr int width = kWidth / sizeof(T);
  V sum[B];
  for (int b = 0; b < B; b++) sum[b] = V{};
  for (int64_t e = 0; e < events; e++) {
    const T* row = w + at[e] * stride;
    const V scale = V{} + value[e];
    for (int b = 0; b < B; b++) sum[b] += scale * *reinterpret_cast<const V*>(row + b * width);
  }
  if (start)
    for (int b = 0; b < B; b++) sum[b] += *reinterpret_cast<const V*>(start + b * width);
  for (int b = 0; b < B; b++) *reinterpret_cast<V*>(out + b * width) = sum[b];
}

template <class T>
void weighted_rows(const T* w, int64_t n, const int32_t* at, const T* value, int64_t events, const T* start, T* out) {
  constexpr int width = kWidth / sizeof(T);
  int64_t done = 0;
  const auto block = [&](auto size) {
    constexpr int B = decltype(size)::value;
    for (; n - done >= B * width; done += B * width)
      rows_block<T, B>(w + done, n, at, value, events, start ? start + done : nullptr, out + done);
  };
  block(std::integral_constant<int, kRegisters>{});
  block(std::integral_constant<int, 4>{});
  block(std::integral_constant<int, 1>{});
  for (; done < n; done++) {
    T sum = T(0);
    for (int64_t e = 0; e < events; e++) sum += value[e] * w[at[e] * n + done];
    out[done] = start ? sum + start[done] : sum;
  }
}

// Grain of parallel work: about 32,000 additions.
int64_t grain(int64_t items, int64_t additions) {
  return std::max<int64_t>(1, 32768 * items / std::max<int64_t>(additions, 1));
}

// out[m, n] = bias + z w
template <class T>
void gather(const T* z, const T* w, const T* bias, T* out, int64_t m, int64_t k, int64_t n, int64_t events) {
  torch::stable::parallel_for(0, m, grain(m, events * n), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> at(k + 16);
    std::vector<T> value(k + 16);
    for (int64_t row = begin; row < end; row++) {
      const int64_t found = events_of(z + row * k, k, at.data(), value.data());
      weighted_rows(w, n, at.data(), value.data(), found, bias, out + row * n);
    }
  });
}

// out[k, n] = z^T g, or += if `more`: the events of each column of z, then rows of g as above.
template <class T>
void scatter(const T* z, const T* g, T* out, int64_t m, int64_t k, int64_t n, int64_t events, bool more) {
  std::vector<int32_t> columns(events + 16), rows(events);
  std::vector<T> values(events + 16), sorted(events);
  std::vector<int64_t> ends(m), start(k + 1, 0);
  int64_t found = 0;
  for (int64_t row = 0; row < m; row++)
    ends[row] = found += events_of(z + row * k, k, columns.data() + found, values.data() + found);
  for (int64_t e = 0; e < found; e++) start[columns[e] + 1]++;
  for (int64_t j = 0; j < k; j++) start[j + 1] += start[j];
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t row = 0, e = 0; row < m; row++)
    for (; e < ends[row]; e++) {
      const int64_t place = next[columns[e]]++;
      rows[place] = static_cast<int32_t>(row);
      sorted[place] = values[e];
    }
  torch::stable::parallel_for(0, k, grain(k, events * n), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) {
      const int64_t mine = start[j + 1] - start[j];
      if (mine || !more)
        weighted_rows<T>(g, n, rows.data() + start[j], sorted.data() + start[j], mine, more ? out + j * n : nullptr, out + j * n);
    }
  });
}

template <class F>
void of_type(const Tensor& like, const F& f) {
  if (like.scalar_type() == ScalarType::Float) return f(float());
  if (like.scalar_type() == ScalarType::Double) return f(double());
  STD_TORCH_CHECK(false, "event products are for float32 and float64");
}

void check(bool fits, const Tensor& z, const Tensor& other) {
  STD_TORCH_CHECK(fits, "the operands of an event product do not fit each other");
  STD_TORCH_CHECK(z.scalar_type() == other.scalar_type(), "the operands of an event product differ in dtype");
}

template <class... Args>
Tensor aten(const char* name, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Where this thread's products are counted: rows of (calls, calls by events, elements, elements that are not zero).
thread_local int64_t* counters = nullptr;

void count_in(const Tensor& table) {
  counters = table.numel() ? static_cast<int64_t*>(table.data_ptr()) : nullptr;
}

// Whether a product is done by events.
template <class T>
bool by_events(const Tensor& z, double crossover, int64_t number, int64_t& events) {
  events = reroll::nonzeros(static_cast<const T*>(z.data_ptr()), 0, 1, z.numel());
  const bool chosen = static_cast<double>(events) <= crossover * static_cast<double>(z.numel());
  if (counters) reroll::count(counters + 4 * number, chosen, z.numel(), events);
  return chosen;
}

// Calls `fill` if a product is done by events, with the operand, what it makes, and how many events there are. `make`
// gives the tensor that is filled.
template <class M, class F>
std::optional<Tensor> filled(const Tensor& z, double crossover, int64_t number, const M& make, const F& fill) {
  std::optional<Tensor> out;
  of_type(z, [&](auto zero) {
    using T = decltype(zero);
    int64_t events = 0;
    if (!by_events<T>(z, crossover, number, events)) return;
    out = make();
    fill(static_cast<const T*>(z.data_ptr()), static_cast<T*>(out->data_ptr()), events);
  });
  return out;
}

// bias [n] or none, z [m, k], w [k, n] -> [m, n]
Tensor product(const std::optional<Tensor>& bias, const Tensor& z, const Tensor& w, double crossover, int64_t number) {
  check(z.dim() == 2 && w.dim() == 2 && z.size(1) == w.size(0), z, w);
  if (bias) check(bias->dim() == 1 && bias->size(0) == w.size(1), z, *bias);
  const Tensor own = torch::stable::contiguous(z);
  const int64_t m = z.size(0), k = z.size(1), n = w.size(1);
  const auto made = [&] { return torch::stable::new_empty(z, {m, n}); };
  const auto out = filled(own, crossover, number, made, [&](const auto* from, auto* to, int64_t events) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Tensor rows = torch::stable::contiguous(w);
    std::optional<Tensor> start;
    if (bias) start = torch::stable::contiguous(*bias);
    gather(from, static_cast<const T*>(rows.data_ptr()), start ? static_cast<const T*>(start->data_ptr()) : nullptr, to, m, k, n, events);
  });
  return out ? *out : aten("aten::linear", own, torch::stable::transpose(w, 0, 1), bias);
}

// `made` [k, n] = z^T g of z [m, k] and g [m, n], or += if `more`; nothing is done if there are too many events.
template <class M>
std::optional<Tensor> scattered(const Tensor& z, const Tensor& g, double crossover, int64_t number, bool more, const M& made) {
  check(z.dim() == 2 && g.dim() == 2 && z.size(0) == g.size(0), z, g);
  return filled(z, crossover, number, made, [&](const auto* from, auto* to, int64_t events) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Tensor rows = torch::stable::contiguous(g);
    scatter(from, static_cast<const T*>(rows.data_ptr()), to, z.size(0), z.size(1), g.size(1), events, more);
  });
}

// z [m, k], g [m, n] -> z^T g [k, n]
Tensor outer(const Tensor& z, const Tensor& g, double crossover, int64_t number) {
  const Tensor own = torch::stable::contiguous(z);
  const auto made = [&] { return torch::stable::new_empty(z, {z.size(1), g.size(1)}); };
  const auto out = scattered(own, g, crossover, number, false, made);
  return out ? *out : aten("aten::mm", torch::stable::transpose(own, 0, 1), g);
}

// total [k, n] += z^T g, if that is done by events; else nothing is done. Whether it was.
bool outer_add(const Tensor& total, const Tensor& z, const Tensor& g, double crossover, int64_t number) {
  const bool fits = total.dim() == 2 && z.dim() == 2 && g.dim() == 2 && total.size(0) == z.size(1) && total.size(1) == g.size(1);
  check(fits && total.is_contiguous(), z, total);
  return scattered(torch::stable::contiguous(z), g, crossover, number, true, [&] { return total; }).has_value();
}

// a copy of w [k, n], row by row
Tensor rows(const Tensor& w) {
  Tensor out = torch::stable::new_empty(w, {w.size(0), w.size(1)});
  torch::stable::copy_(out, w);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(reroll, CPU, library) {
  library.impl("event_product", TORCH_BOX(&product));
  library.impl("event_outer", TORCH_BOX(&outer));
  library.impl("event_outer_add", TORCH_BOX(&outer_add));
  library.impl("event_rows", TORCH_BOX(&rows));
  library.impl("event_count", TORCH_BOX(&count_in));
}
