// What greedy sampling needs of a row of logits, in one pass.
#pragma once

#include "vectors.h"

// Index of the largest, the first among equals; false where a number is not finite, and then the index means nothing.
inline bool rank_row(const float* logits, int64_t size, int64_t& largest) {
  constexpr int kWays = 4;  // in flight at once
  __m512 best[kWays], zeros[kWays];  // a finite number times zero is zero, any other is NaN
  __m512i place[kWays];
  for (int w = 0; w < kWays; ++w) {
    best[w] = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    zeros[w] = _mm512_setzero_ps();
    place[w] = _mm512_setzero_si512();
  }
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < size; i += 16 * kWays)
    for (int w = 0; w < kWays; ++w) {
      const int64_t begin = i + 16 * w, count = std::clamp<int64_t>(size - begin, 0, 16);
      const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
      const __m512 value = _mm512_maskz_loadu_ps(mask, logits + begin);
      zeros[w] = _mm512_fmadd_ps(value, _mm512_setzero_ps(), zeros[w]);
      const __mmask16 larger = _mm512_mask_cmp_ps_mask(mask, value, best[w], _CMP_GT_OQ);
      best[w] = _mm512_mask_mov_ps(best[w], larger, value);
      place[w] = _mm512_mask_add_epi32(place[w], larger, lanes, _mm512_set1_epi32(static_cast<int>(begin)));
    }
  float maximum = -std::numeric_limits<float>::infinity();
  for (int w = 0; w < kWays; ++w) maximum = std::max(maximum, _mm512_reduce_max_ps(best[w]));
  largest = size;
  bool is_finite = true;
  for (int w = 0; w < kWays; ++w) {
    const __mmask16 equal = _mm512_cmp_ps_mask(best[w], _mm512_set1_ps(maximum), _CMP_EQ_OQ);
    largest = std::min<int64_t>(largest, _mm512_mask_reduce_min_epu32(equal, place[w]));
    is_finite = is_finite && _mm512_reduce_add_ps(zeros[w]) == 0.0f;
  }
  return is_finite;
}
