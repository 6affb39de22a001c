// What all kernels share: bfloat16, a vector exponential, and memory for what lies between two operations.
//
// bfloat16 is the upper half of a float32. A product of two of them is exact in float32, and every sum here is kept in
// float32, always in the same order for a given row: so a row gets the same bits whoever shares its batch.
#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
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

// Memory of one call for what lies between its operations, kept for the next call. It is not zeroed.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { free_all(); }

  // Everything taken before is given back. What did not fit into one piece will now.
  void begin() {
    if (blocks_.size() > 1) {
      free_all();
      add(total_);
    }
    used_ = 0;
  }

  template <typename T>
  T* take(int64_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (blocks_.empty() || used_ + bytes > size_) add(std::max(bytes, total_));
    char* taken = blocks_.back() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(taken);
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;

  void add(size_t bytes) {
    size_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* block = std::aligned_alloc(kHugePage, size_);
    if (block == nullptr) throw std::bad_alloc();
    madvise(block, size_, MADV_HUGEPAGE);  // if it can
    blocks_.push_back(static_cast<char*>(block));
    total_ = std::max(total_, blocks_.size() > 1 ? total_ + size_ : size_);
    used_ = 0;
  }

  void free_all() {
    for (char* block : blocks_) std::free(block);
    blocks_.clear();
  }

  std::vector<char*> blocks_;
  size_t size_ = 0, used_ = 0, total_ = 0;
};
