// Elements of an operand that are not zero: how many there are, and where.

#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace reroll {

#if defined(__AVX512F__)
using Lanes = __m512;
constexpr int kLanes = 16;  // float32 elements that are looked at together

inline Lanes lanes_at(const float* z) { return _mm512_loadu_ps(z); }
inline uint32_t events_in(Lanes part) { return _mm512_cmp_ps_mask(part, _mm512_setzero_ps(), _CMP_NEQ_UQ); }

// The events of a part of a row, which begins with element k, without what lies between them.
inline void put_together(Lanes part, uint32_t some, int64_t k, int32_t* at, float* value) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(k)));
  const __mmask16 mask = static_cast<__mmask16>(some);
  _mm512_storeu_si512(at, _mm512_maskz_compress_epi32(mask, places));
  _mm512_storeu_ps(value, _mm512_maskz_compress_ps(mask, part));
}
#elif defined(__AVX2__)
using Lanes = __m256;
constexpr int kLanes = 8;

inline Lanes lanes_at(const float* z) { return _mm256_loadu_ps(z); }
inline uint32_t events_in(Lanes part) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(part, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
}

// For every set of eight lanes: those of the set in rising order, a byte for each.
struct Orders {
  uint64_t of[256];
  constexpr Orders() : of() {
    for (int set = 0; set < 256; set++)
      for (int lane = 0, place = 0; lane < 8; lane++)
        if (set >> lane & 1) of[set] |= static_cast<uint64_t>(lane) << 8 * place++;
  }
};
inline constexpr Orders kOrders;

inline void put_together(Lanes part, uint32_t some, int64_t k, int32_t* at, float* value) {
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(kOrders.of[some])));
  const __m256i places = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(k)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), places);
  _mm256_storeu_ps(value, _mm256_permutevar8x32_ps(part, lanes));
}
#endif

// Rows are `stride` elements apart.
template <class T>
int64_t nonzeros(const T* z, int64_t stride, int64_t rows, int64_t count) {
  int64_t found = 0;
  for (int64_t row = 0; row < rows; row++) {
    const T* from = z + row * stride;
    int64_t k = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
      for (; k + kLanes <= count; k += kLanes) found += __builtin_popcount(events_in(lanes_at(from + k)));
#endif
    for (; k < count; k++) found += from[k] != T(0);
  }
  return found;
}

// The events of a row of z: where they are, and their values. Both lists have room for 16 more.
template <class T>
int64_t events_of(const T* z, int64_t count, int32_t* at, T* value) {
  int64_t found = 0, k = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    for (; k + kLanes <= count; k += kLanes) {
      const Lanes part = lanes_at(z + k);
      const uint32_t some = events_in(part);
      put_together(part, some, k, at + found, value + found);
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
