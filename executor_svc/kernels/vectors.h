// What all kernels share: bfloat16, a vector exponential, and a team of threads that share out work.
//
// bfloat16 is the upper half of a float32. A product of two of them is exact in float32, and every sum here is kept in
// float32, always in the same order for a given row: so a row gets the same bits whoever shares its batch.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

using bf16 = uint16_t;

inline __m512 load_bf16(const bf16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store_bf16(bf16* to, __m512 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(value));
}

inline __m512bh load_pairs(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512bh broadcast_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// exp(x) for x <= 88, to about two units in the last place. NaN stays NaN: the constant is the first operand, and the
// second one is what max returns when either is NaN.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Work is shared out item by item through a counter, so that a thread that the system interrupts holds up the others by
// one item at most. A team waits by turning for a while and then yields: what else runs on the machine is not starved.
class Team {
 public:
  explicit Team(int num_counters) : counters_(num_counters) {}

  int size = 1;  // threads; set before the first call

  // Calls do_item(i) for each i in [0, count) on whichever thread is free, then waits for all. Counters are used up in
  // order: each thread passes the same sequence of calls.
  template <typename DoItem>
  void share(int& counter, int64_t count, int64_t grain, const DoItem& do_item) {
    std::atomic<int64_t>& next = counters_[counter++].value;
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) break;
      for (int64_t i = first; i < std::min(first + grain, count); ++i) do_item(i);
    }
    wait();
  }

  void wait() {
    if (size == 1) return;
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; round_.load(std::memory_order_acquire) == round; ++turn) {
      if (turn < 2000) _mm_pause();
      else sched_yield();
    }
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  std::vector<Counter> counters_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};
