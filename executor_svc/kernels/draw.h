// Drawing a token from a row of logits: temperature, min_p, top_k and top_p, then the inverse of the distribution function
// over token ids. What each of them keeps is a number of the most likely tokens, the lower id first among equal ones; so
// one token is the last that stays. It is found without sorting the row: a histogram of the logits by their upper bits
// tells in which bin it lies, and only that bin is sorted. Sums are taken in one order that the row alone decides.
#pragma once

#include "vectors.h"

struct DrawParams {
  float temperature, top_p, min_p;  // above 0; in (0, 1], 1 keeps all; in [0, 1], 0 keeps all
  int64_t top_k;                    // at least the size of the row keeps all
};

class Draw {
 public:
  // Memory for rows of up to that size, of one thread.
  explicit Draw(int64_t size) : size_(size), below_(size), weights_(size + 15), counts_(kBins), masses_(kBins) {}

  // `uniform` is in [0, 1). -inf excludes a token. Where none is left, or one is infinite, the result means nothing.
  int64_t row(const float* logits, const DrawParams& params, float uniform) {
    double total = weigh(logits, params.temperature);
    if (!(total > 0)) return 0;
    if (params.top_p < 1 || params.min_p > 0 || params.top_k < size_) total = filter(params, total);
    return find(uniform * total);
  }

 private:
  static constexpr int kShift = 19;
  static constexpr int64_t kBins = (0x7f800000 >> kShift) + 1;  // of positive numbers up to infinity
  static constexpr float kMost = 87.0f;                         // below the largest; further down weighs nothing
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  static int64_t bin(float below) {
    uint32_t bits;
    std::memcpy(&bits, &below, sizeof bits);
    return bits >> kShift;
  }

  // How far each token is below the most likely one, in units of the temperature, and its weight relative to that one.
  // Returns the sum of all weights.
  double weigh(const float* logits, float temperature) {
    __m512 largest = _mm512_set1_ps(-kInfinity);
    for (int64_t i = 0; i < size_; i += 16) largest = _mm512_max_ps(largest, load(logits + i, size_ - i, largest));
    const __m512 maximum = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    const __m512 divisor = _mm512_set1_ps(std::max(temperature, std::numeric_limits<float>::min()));
    double total = 0;
    for (int64_t i = 0; i < size_; i += 16) {
      const __mmask16 mask = first(size_ - i);
      const __m512 below = _mm512_div_ps(_mm512_sub_ps(maximum, _mm512_maskz_loadu_ps(mask, logits + i)), divisor);
      const __mmask16 counts = mask & _mm512_cmp_ps_mask(below, _mm512_set1_ps(kMost), _CMP_LE_OQ);
      const __m512 weight = _mm512_maskz_mov_ps(counts, exponential(_mm512_sub_ps(_mm512_setzero_ps(), below)));
      _mm512_mask_storeu_ps(below_.data() + i, mask, _mm512_mask_mov_ps(_mm512_set1_ps(kInfinity), counts, below));
      _mm512_storeu_ps(weights_.data() + i, weight);
      total += _mm512_reduce_add_ps(weight);
    }
    return total;
  }

  static __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << std::min<int64_t>(count, 16)) - 1); }

  static __m512 load(const float* from, int64_t count, __m512 otherwise) {
    return _mm512_mask_loadu_ps(otherwise, first(count), from);
  }

  // Sets the weights of what does not stay to zero. Returns the sum of the others.
  double filter(const DrawParams& params, double total) {
    std::fill(counts_.begin(), counts_.end(), 0);
    std::fill(masses_.begin(), masses_.end(), 0.0);
    int64_t kept = 0;
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t at = bin(below_[i]);
      ++counts_[at];
      masses_[at] += weights_[i];
      kept += weights_[i] >= params.min_p;
    }
    Place last = first_tokens(std::min(kept, params.top_k), total);
    if (params.top_p < 1) {
      const Place nucleus = first_mass(params.top_p * last.mass);
      if (nucleus.rank < last.rank) last = nucleus;
    }
    if (last.rank == size_) return total;
    double sum = 0;
    for (int64_t i = 0; i < size_; ++i) {
      const bool stays = below_[i] < last.below || (below_[i] == last.below && i <= last.token);
      if (!stays) weights_[i] = 0;
      sum += weights_[i];
    }
    return sum;
  }

  // The last of the tokens that stay: how many there are, what they weigh, and where the last one is.
  struct Place {
    int64_t rank;
    double mass;
    float below;
    int64_t token;
  };

  Place first_tokens(int64_t count, double total) {
    if (count >= size_) return {size_, total, 0, 0};
    int64_t rank = 0, at = 0;
    double mass = 0;
    for (; rank + counts_[at] < count; ++at) rank += counts_[at], mass += masses_[at];
    sort_bin(at);
    for (size_t i = 0;; ++i) {
      mass += weights_[sorted_[i]];
      if (++rank >= count) return {rank, mass, below_[sorted_[i]], sorted_[i]};
    }
  }

  // As many tokens as it takes to reach `goal`, at least one.
  Place first_mass(double goal) {
    int64_t rank = 0, at = 0, last = 0;
    double mass = 0;
    for (int64_t i = 0; i < kBins; ++i)
      if (masses_[i] > 0) last = i;
    for (; at < last && mass + masses_[at] < goal; ++at) rank += counts_[at], mass += masses_[at];
    sort_bin(at);
    for (size_t i = 0;; ++i) {
      mass += weights_[sorted_[i]], ++rank;
      if (mass >= goal || i + 1 == sorted_.size()) return {rank, mass, below_[sorted_[i]], sorted_[i]};
    }
  }

  // Tokens of one bin, the most likely first.
  void sort_bin(int64_t at) {
    sorted_.clear();
    for (int64_t i = 0; i < size_; ++i)
      if (bin(below_[i]) == at) sorted_.push_back(i);
    std::sort(sorted_.begin(), sorted_.end(), [&](int64_t a, int64_t b) {
      return below_[a] < below_[b] || (below_[a] == below_[b] && a < b);
    });
  }

  // The first token up to which the weights are more than `target`; the last that weighs anything if rounding left none.
  int64_t find(double target) const {
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < size_; i += 16) {
      const double block = _mm512_reduce_add_ps(_mm512_loadu_ps(weights_.data() + i));
      if (block > 0) last = i;
      if (sum + block <= target) {
        sum += block;
        continue;
      }
      for (int64_t j = i; j < std::min(i + 16, size_); ++j)
        if ((sum += weights_[j]) > target) return j;
    }
    int64_t token = std::min(last + 16, size_) - 1;
    while (token > last && weights_[token] == 0) --token;
    return token;
  }

  const int64_t size_;
  std::vector<float> below_, weights_;
  std::vector<int64_t> counts_, sorted_;
  std::vector<double> masses_;
};
