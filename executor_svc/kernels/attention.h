// Attention over a paged bfloat16 cache with grouped query heads, for head sizes of 64, 128 and 256.
//
// Decode reads each key and value where it lies. A context is cut into pieces of 512 keys, always at the same places, so
// that a row's result depends on that row alone however many threads share the pieces. A prefill first packs the keys
// and values it will see, once, then goes through them in blocks, as far as causality lets a tile of queries see: there
// is no mask. Both keep a running maximum and sum. Keys out of sight are never multiplied, whatever they hold.
#pragma once

#include "vectors.h"

struct Pages {
  bf16* keys;  // [blocks][block_size][kv_heads][head_dim]
  bf16* values;
  int64_t block_size, kv_heads, heads, head_dim;
  float scale;
  int64_t window;  // tokens that a query sees, itself included; 0 sees all

  int64_t group() const { return heads / kv_heads; }
  int64_t row(const int64_t* table, int64_t place) const {
    return table[place / block_size] * block_size + place % block_size;
  }
  int64_t first_seen(int64_t place) const { return window > 0 ? std::max<int64_t>(0, place + 1 - window) : 0; }
};

constexpr int64_t kPiece = 512;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Sums of 16 vectors, one in each lane. Always in the same order.
inline __m512 sums_of_16(const __m512* v) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  // b[i] holds, in each 128-bit part, sums of vectors 4i to 4i+3 over that part's four lanes.
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

// Where the keys and values of places [begin, end) begin: rows of the flat cache.
inline void find_rows(const Pages& pages, const int64_t* table, int64_t begin, int64_t end, int64_t* rows) {
  int64_t block = begin / pages.block_size, place = begin % pages.block_size;
  for (int64_t i = 0; i < end - begin; ++i) {
    rows[i] = table[block] * pages.block_size + place;
    if (++place == pages.block_size) ++block, place = 0;
  }
}

// Sums of values, weighted for `Num` heads that share them: weights are [Num][kPiece], sums [Num][stride].
template <int Dim, int Num>
inline void weighted_values(const bf16* values, int64_t stride, const int64_t* rows, int64_t count,
                            const float* weights, float* sums, int64_t sums_stride) {
  __m512 sum[Num][Dim / 16];
  for (int g = 0; g < Num; ++g)
    for (int d = 0; d < Dim / 16; ++d) sum[g][d] = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; ++i) {
    const bf16* value = values + rows[i] * stride;
    for (int d = 0; d < Dim / 16; ++d) {
      if (d % 2 == 0 && i + 8 < count) _mm_prefetch(values + rows[i + 8] * stride + 16 * d, _MM_HINT_T0);
      const __m512 part = load_bf16(value + 16 * d);
      for (int g = 0; g < Num; ++g)
        sum[g][d] = _mm512_fmadd_ps(_mm512_set1_ps(weights[g * kPiece + i]), part, sum[g][d]);
    }
  }
  for (int g = 0; g < Num; ++g)
    for (int d = 0; d < Dim / 16; ++d) _mm512_storeu_ps(sums + g * sums_stride + 16 * d, sum[g][d]);
}

// Scores of one head for `count` keys, in place of which their weights stay. Returns maximum and sum of the weights.
inline void to_weights(float* scores, int64_t count, __m512 largest, float& maximum, float& total) {
  maximum = _mm512_reduce_max_ps(largest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(maximum)));
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(scores + i, weight);
  }
  total = _mm512_reduce_add_ps(sum);
}

// Scaled scores of one head for up to 16 keys; what is beyond `count` is out of sight.
template <int Dim>
inline __m512 score_16(const bf16* keys, int64_t stride, const int64_t* rows, int64_t count, const bf16* query,
                       float scale) {
  __m512bh pairs[Dim / 32];
  for (int d = 0; d < Dim / 32; ++d) pairs[d] = load_pairs(query + 32 * d);
  __m512 sums[16];
  for (int j = 0; j < 16; ++j) {
    sums[j] = _mm512_setzero_ps();
    const bf16* key = keys + rows[j < count ? j : 0] * stride;  // one that may be read, and is not used
    for (int d = 0; d < Dim / 32; ++d) {
      if (j + 16 < count) _mm_prefetch(keys + rows[j + 16] * stride + 32 * d, _MM_HINT_T0);
      sums[j] = _mm512_dpbf16_ps(sums[j], pairs[d], load_pairs(key + 32 * d));
    }
  }
  const __mmask16 seen = static_cast<__mmask16>((1u << std::min<int64_t>(count, 16)) - 1);
  return _mm512_mask_mul_ps(_mm512_set1_ps(kNothing), seen, sums_of_16(sums), _mm512_set1_ps(scale));
}

// Of one piece of one row's context and one KV head: for each head of the group the maximum, the sum and, not yet
// divided by it, the weighted values: `partial` is [group][2 + head_dim]. `query` is [group][head_dim].
template <int Dim>
inline void decode_piece(const Pages& pages, const bf16* query, const int64_t* table, int64_t head, int64_t begin,
                         int64_t end, float* partial) {
  constexpr int64_t kHeads = Dim == 64 ? 4 : Dim == 128 ? 2 : 1;  // whose sums fit into the registers
  const int64_t group = pages.group(), stride = pages.kv_heads * Dim, count = end - begin, each = 2 + Dim;
  const bf16 *keys = pages.keys + head * Dim, *values = pages.values + head * Dim;
  int64_t rows[kPiece];
  find_rows(pages, table, begin, end, rows);
  for (int64_t first = 0; first < group; first += kHeads) {
    const int64_t num = std::min(kHeads, group - first);
    alignas(64) float scores[kHeads * kPiece];
    __m512 largest[kHeads];
    for (int64_t g = 0; g < num; ++g) largest[g] = _mm512_set1_ps(kNothing);
    for (int64_t i = 0; i < count; i += 16)
      for (int64_t g = 0; g < num; ++g) {
        const __m512 score = score_16<Dim>(keys, stride, rows + i, count - i, query + (first + g) * Dim, pages.scale);
        largest[g] = _mm512_max_ps(largest[g], score);
        _mm512_storeu_ps(scores + g * kPiece + i, score);
      }
    float* out = partial + first * each;
    for (int64_t g = 0; g < num; ++g)
      to_weights(scores + g * kPiece, count, largest[g], out[g * each], out[g * each + 1]);
    switch (num) {
      case 1: weighted_values<Dim, 1>(values, stride, rows, count, scores, out + 2, each); break;
      case 2: weighted_values<Dim, 2>(values, stride, rows, count, scores, out + 2, each); break;
      case 3: weighted_values<Dim, 3>(values, stride, rows, count, scores, out + 2, each); break;
      case 4: weighted_values<Dim, 4>(values, stride, rows, count, scores, out + 2, each); break;
    }
  }
}

inline void decode_piece(const Pages& pages, const bf16* query, const int64_t* table, int64_t head, int64_t begin,
                         int64_t end, float* partial) {
  switch (pages.head_dim) {
    case 64: return decode_piece<64>(pages, query, table, head, begin, end, partial);
    case 128: return decode_piece<128>(pages, query, table, head, begin, end, partial);
    case 256: return decode_piece<256>(pages, query, table, head, begin, end, partial);
  }
}

// Joins the pieces of one row and one head, in their order. `step` is between the head's partials of two pieces.
inline void join_pieces(const float* partial, int64_t step, int64_t pieces, int64_t dim, bf16* out) {
  float maximum = kNothing, total = 0;
  for (int64_t p = 0; p < pieces; ++p) maximum = std::max(maximum, partial[p * step]);
  for (int64_t p = 0; p < pieces; ++p) total += partial[p * step + 1] * std::exp(partial[p * step] - maximum);
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t p = 0; p < pieces; ++p)
      sum = _mm512_fmadd_ps(_mm512_set1_ps(std::exp(partial[p * step] - maximum)),
                            _mm512_loadu_ps(partial + p * step + 2 + d), sum);
    store_bf16(out + d, _mm512_div_ps(sum, _mm512_set1_ps(total)));
  }
}

// Attention of `rows` sequences with one token each: out is [rows][heads][head_dim].
class DecodeAttention {
 public:
  DecodeAttention(int64_t rows, const int64_t* tables, int64_t width, const int64_t* lengths, int64_t heads,
                  int64_t head_dim)
      : rows_(rows), tables_(tables), width_(width), lengths_(lengths) {
    for (int64_t row = 0; row < rows; ++row) pieces_ = std::max(pieces_, (lengths[row] + kPiece - 1) / kPiece);
    partials_.resize(rows * pieces_ * heads * (2 + head_dim));
  }

  // prepare(row, kv_head, is_last) returns the queries of that KV head's group, [group][head_dim]; it is called once for
  // each piece, before its keys are read, and `is_last` for the piece that ends with the row's own token.
  template <typename Prepare>
  void run(Team& team, int& counter, const Pages& pages, const Prepare& prepare, bf16* out) {
    const int64_t each = 2 + pages.head_dim, step = pages.heads * each, group = pages.group();
    team.share(counter, rows_ * pieces_ * pages.kv_heads, 1, [&](int64_t item) {
      const int64_t head = item % pages.kv_heads, piece = item / pages.kv_heads % pieces_;
      const int64_t row = item / pages.kv_heads / pieces_, length = lengths_[row];
      const int64_t first = pages.first_seen(length - 1);
      const int64_t begin = std::max(piece * kPiece, first), end = std::min((piece + 1) * kPiece, length);
      if (begin >= end) return;
      float* partial = partials_.data() + (row * pieces_ + piece) * step + head * group * each;
      decode_piece(pages, prepare(row, head, end == length), tables_ + row * width_, head, begin, end, partial);
      if (begin == first && end == length)
        for (int64_t g = 0; g < group; ++g)
          join_pieces(partial + g * each, step, 1, pages.head_dim,
                      out + (row * pages.heads + head * group + g) * pages.head_dim);
    });
    if (pieces_ == 1) return;
    team.share(counter, rows_ * pages.heads, 4, [&](int64_t item) {
      const int64_t row = item / pages.heads, head = item % pages.heads, length = lengths_[row];
      const int64_t skipped = pages.first_seen(length - 1) / kPiece;
      const float* partial = partials_.data() + (row * pieces_ + skipped) * step + head * each;
      const int64_t pieces = (length + kPiece - 1) / kPiece - skipped;
      if (pieces > 1) join_pieces(partial, step, pieces, pages.head_dim, out + item * pages.head_dim);
    });
  }

 private:
  const int64_t rows_;
  const int64_t* tables_;
  const int64_t width_;
  const int64_t* lengths_;
  int64_t pieces_ = 1;
  std::vector<float> partials_;
};
