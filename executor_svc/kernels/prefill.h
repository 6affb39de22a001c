// Attention of a chunk of one sequence to what was computed before it and, causally, to itself. See attention.h.
#pragma once

#include "attention.h"

constexpr int64_t kKeys = 64;    // keys of a block
constexpr int64_t kQueries = 16; // tokens of a tile; its rows are these times the heads of a group
constexpr int kTileRows = 6;     // rows at once: 24 sums of 64 outputs

// sums[r][n] += rows of `left` [.][stride], pairs along k, times `right` [k / 2][width][2], for 64 columns from `column`.
template <int Num>
inline void tile_product(const bf16* left, int64_t stride, int64_t inner, const bf16* right, int64_t width, float* sums,
                         int64_t sums_stride, bool from_zero) {
  __m512 sum[Num][4];
  for (int r = 0; r < Num; ++r)
    for (int c = 0; c < 4; ++c)
      sum[r][c] = from_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * sums_stride + 16 * c);
  for (int64_t k = 0; k < inner; k += 2) {
    __m512bh columns[4];
    for (int c = 0; c < 4; ++c) columns[c] = load_pairs(right + k * width + 32 * c);
    for (int r = 0; r < Num; ++r) {
      const __m512bh pair = broadcast_pair(left + r * stride + k);
      for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair, columns[c]);
    }
  }
  for (int r = 0; r < Num; ++r)
    for (int c = 0; c < 4; ++c) _mm512_storeu_ps(sums + r * sums_stride + 16 * c, sum[r][c]);
}

inline void tile_product(int64_t rows, const bf16* left, int64_t stride, int64_t inner, const bf16* right,
                         int64_t width, float* sums, int64_t sums_stride, bool from_zero) {
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const bf16* l = left + row * stride;
    float* s = sums + row * sums_stride;
    switch (std::min<int64_t>(kTileRows, rows - row)) {
#define CASE(n) case n: tile_product<n>(l, stride, inner, right, width, s, sums_stride, from_zero); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
  }
}

// One block of scores of one row, [64]: scaled, weighed against the running maximum, written as bfloat16. Columns
// outside [begin, end) are out of sight. Returns the factor for what was summed before.
inline float weigh(float* scores, int64_t begin, int64_t end, float scale, float& maximum, float& total, bf16* weights) {
  __m512 score[4], largest = _mm512_set1_ps(maximum);
  for (int c = 0; c < 4; ++c) {
    const int64_t low = std::clamp<int64_t>(begin - 16 * c, 0, 16), high = std::clamp<int64_t>(end - 16 * c, 0, 16);
    const __mmask16 seen = static_cast<__mmask16>(((1u << high) - 1) & ~((1u << low) - 1));
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * c), _mm512_set1_ps(scale));
    score[c] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kNothing), scaled);
    largest = _mm512_max_ps(largest, score[c]);
  }
  const float next = _mm512_reduce_max_ps(largest);
  if (next == kNothing) {  // nothing seen so far: the difference of two infinities must not be taken
    std::memset(weights, 0, kKeys * sizeof(bf16));
    return 1.0f;
  }
  __m512 sum = _mm512_setzero_ps();
  for (int c = 0; c < 4; ++c) {
    const __m512 weight = exponential(_mm512_sub_ps(score[c], _mm512_set1_ps(next)));
    sum = _mm512_add_ps(sum, weight);
    store_bf16(weights + 16 * c, weight);
  }
  const float factor = maximum == next ? 1.0f : std::exp(maximum - next);
  total = total * factor + _mm512_reduce_add_ps(sum);
  maximum = next;
  return factor;
}

class PrefillAttention {
 public:
  // Tokens [start, start + tokens) of a sequence with the blocks of `table`.
  PrefillAttention(Scratch& scratch, int64_t tokens, int64_t start, const int64_t* table, int64_t kv_heads,
                   int64_t head_dim)
      : tokens_(tokens), start_(start), table_(table), blocks_((start + tokens + kKeys - 1) / kKeys) {
    keys_ = scratch.take<bf16>(kv_heads * blocks_ * kKeys * head_dim);
    values_ = scratch.take<bf16>(kv_heads * blocks_ * kKeys * head_dim);
  }

  // query and out are [tokens][heads][head_dim].
  void run(Team& team, Member& member, const Pages& pages, const bf16* query, bf16* out) {
    const int64_t first_block = pages.first_seen(start_) / kKeys;
    team.share(member, (blocks_ - first_block) * pages.kv_heads, 4, [&](int64_t item) {
      pack(pages, item % pages.kv_heads, first_block + item / pages.kv_heads);
    });
    const int64_t tiles = (tokens_ + kQueries - 1) / kQueries;
    team.share(member, tiles * pages.kv_heads, 1, [&](int64_t item) {
      attend(pages, item % pages.kv_heads, tiles - 1 - item / pages.kv_heads, query, out);  // the longest ones first
    });
  }

 private:
  bf16* packed(bf16* all, const Pages& pages, int64_t head, int64_t block) const {
    return all + (head * blocks_ + block) * kKeys * pages.head_dim;
  }

  // Keys become [head_dim / 2][64][2] and values [32][head_dim][2]. Beyond the context both are zero.
  void pack(const Pages& pages, int64_t head, int64_t block) {
    bf16* keys = packed(keys_, pages, head, block);
    bf16* values = packed(values_, pages, head, block);
    const int64_t dim = pages.head_dim, count = std::min(kKeys, start_ + tokens_ - block * kKeys);
    for (int64_t i = 0; i < kKeys; ++i) {
      const bool is_real = i < count;
      const int64_t from = is_real ? (pages.row(table_, block * kKeys + i) * pages.kv_heads + head) * dim : 0;
      for (int64_t d = 0; d < dim; d += 2) {
        keys[d * kKeys + 2 * i] = is_real ? pages.keys[from + d] : 0;
        keys[d * kKeys + 2 * i + 1] = is_real ? pages.keys[from + d + 1] : 0;
      }
      bf16* to = values + i / 2 * 2 * dim + i % 2;
      for (int64_t d = 0; d < dim; ++d) to[2 * d] = is_real ? pages.values[from + d] : 0;
    }
  }

  void attend(const Pages& pages, int64_t head, int64_t tile, const bf16* query, bf16* out) {
    const int64_t dim = pages.head_dim, group = pages.group(), heads = pages.heads;
    const int64_t first = tile * kQueries, count = std::min(kQueries, tokens_ - first), rows = count * group;
    std::vector<bf16> queries(rows * dim), weights(rows * kKeys);
    std::vector<float> scores(rows * kKeys), sums(rows * dim, 0.0f), maxima(rows, kNothing), totals(rows, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(queries.data() + row * dim, query + ((first + row / group) * heads + head * group + row % group) * dim,
                  dim * sizeof(bf16));
    const int64_t last_block = (start_ + first + count - 1) / kKeys;
    for (int64_t block = pages.first_seen(start_ + first) / kKeys; block <= last_block; ++block) {
      // Tokens before the block see nothing of it, so they must not even be multiplied by zeros.
      const int64_t from = std::max<int64_t>(0, block * kKeys - start_ - first) * group, seeing = rows - from;
      const bf16 *block_keys = packed(keys_, pages, head, block), *block_values = packed(values_, pages, head, block);
      tile_product(seeing, queries.data() + from * dim, dim, dim, block_keys, kKeys, scores.data() + from * kKeys, kKeys,
                   true);
      for (int64_t row = from; row < rows; ++row) {
        const int64_t place = start_ + first + row / group;
        const float factor = weigh(scores.data() + row * kKeys, pages.first_seen(place) - block * kKeys,
                                   place + 1 - block * kKeys, pages.scale, maxima[row], totals[row],
                                   weights.data() + row * kKeys);
        if (factor != 1.0f) scale_row(sums.data() + row * dim, dim, factor);
      }
      for (int64_t column = 0; column < dim; column += 64)
        tile_product(seeing, weights.data() + from * kKeys, kKeys, kKeys, block_values + 2 * column, dim,
                     sums.data() + from * dim + column, dim, false);
    }
    for (int64_t row = 0; row < rows; ++row) {
      bf16* to = out + ((first + row / group) * heads + head * group + row % group) * dim;
      for (int64_t d = 0; d < dim; d += 16)
        store_bf16(to + d, _mm512_div_ps(_mm512_loadu_ps(sums.data() + row * dim + d), _mm512_set1_ps(totals[row])));
    }
  }

  static void scale_row(float* sums, int64_t dim, float factor) {
    for (int64_t d = 0; d < dim; d += 16)
      _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(factor)));
  }

  const int64_t tokens_, start_;
  const int64_t* table_;
  const int64_t blocks_;
  bf16 *keys_, *values_;
};
