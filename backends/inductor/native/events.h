// Elements of an operand that are not zero: how many there are, and where.

#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace reroll {

// Rows are `stride` elements apart.
template <class T>
int64_t nonzeros(const T* z, int64_t stride, int64_t rows, int64_t count) {
  int64_t found = 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t k = 0; k < count; k++) found += z[row * stride + k] != T(0);
  return found;
}

// The events of a row of z: where they are, and their values. Both lists have room for 16 more.
template <class T>
int64_t events_of(const T* z, int64_t count, int32_t* at, T* value) {
  int64_t found = 0, k = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; k + 16 <= count; k += 16) {
      const __m512 part = _mm512_loadu_ps(z + k);
      const __mmask16 some = _mm512_cmp_ps_mask(part, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(k)));
      _mm512_storeu_si512(at + found, _mm512_maskz_compress_epi32(some, places));
      _mm512_storeu_ps(value + found, _mm512_maskz_compress_ps(some, part));
      found += __builtin_popcount(some);
    }
  }
#endif
  for (; k < count; k++) {
    at[found] = static_cast<int32_t>(k);
    value[found] = z[k];
    found += z[k] != T(0);
  }
  return found;
}

// One more product, seen in a row of a table: (calls, calls by events, elements, elements that are not zero).
inline void count(int64_t* row, bool by_events, int64_t elements, int64_t events) {
  const int64_t seen[] = {1, by_events, elements, events};
  for (int i = 0; i < 4; i++) __atomic_fetch_add(row + i, seen[i], __ATOMIC_RELAXED);
}

}  // namespace reroll
