// Attention over a paged bfloat16 cache with grouped query heads, for head sizes of 64, 128 and 256.
//
// Decode reads each key and value where it lies. A context is cut into pieces of 512 keys, always at the same places, so
// that a row's result depends on that row alone however many threads share the pieces. A prefill first packs the keys
// and values it will see, once, then goes through them in blocks, as far as causality lets a tile of queries see: there
// is no mask. Both keep a running maximum and sum. Keys out of sight are never multiplied, whatever they hold.
#pragma once

#include "team.h"
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

// The keys and values of a piece, asked for a while before they are read. A row after the other, `width` numbers of each.
class Stream {
 public:
  Stream(const Pages& pages, const int64_t* table, int64_t begin, int64_t end, int64_t head, int64_t width)
      : pages_(pages),
        table_(table),
        place_(begin),
        end_(end),
        block_(begin / pages.block_size),
        offset_(begin % pages.block_size),
        column_(head * pages.head_dim),
        width_(width) {}

  __attribute__((always_inline)) void fetch(int64_t rows) {
    for (; rows > 0 && place_ < end_; --rows, ++place_) {
      const int64_t row = table_[block_] * pages_.block_size + offset_;
      const int64_t from = row * pages_.kv_heads * pages_.head_dim + column_;
      for (int64_t i = 0; i < width_; i += 32) {
        _mm_prefetch(pages_.keys + from + i, _MM_HINT_T1);
        _mm_prefetch(pages_.values + from + i, _MM_HINT_T1);
      }
      if (++offset_ == pages_.block_size) ++block_, offset_ = 0;
    }
  }

 private:
  const Pages& pages_;
  const int64_t* table_;
  int64_t place_;
  const int64_t end_;
  int64_t block_, offset_;
  const int64_t column_, width_;
};

// Sums of values, weighted for `Num` heads that share them: weights are [Num][kPiece], sums [Num][stride]. `advance()` is
// called for each 16 values.
template <int Dim, int Num, typename Advance>
inline void weighted_values(const bf16* values, int64_t stride, const int64_t* rows, int64_t count,
                            const float* weights, const Advance& advance, float* sums, int64_t sums_stride) {
  __m512 sum[Num][Dim / 16];
  for (int g = 0; g < Num; ++g)
    for (int d = 0; d < Dim / 16; ++d) sum[g][d] = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; ++i) {
    if (i % 16 == 0) advance();
    const bf16* value = values + rows[i] * stride;
    for (int d = 0; d < Dim / 16; ++d) {
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
    for (int d = 0; d < Dim / 32; ++d) sums[j] = _mm512_dpbf16_ps(sums[j], pairs[d], load_pairs(key + 32 * d));
  }
  const __mmask16 seen = static_cast<__mmask16>((1u << std::min<int64_t>(count, 16)) - 1);
  return _mm512_mask_mul_ps(_mm512_set1_ps(kNothing), seen, sums_of_16(sums), _mm512_set1_ps(scale));
}

// Of one piece of one row's context and one KV head: for each head of the group the maximum, the sum and, not yet
// divided by it, the weighted values: `partial` is [group][2 + head_dim]. `query` is [group][head_dim]; keys and values
// are those of the KV head. `advance()` is called for each 16 keys and each 16 values.
template <int Dim, typename Advance>
inline void decode_piece(const Pages& pages, const bf16* keys, const bf16* values, const bf16* query,
                         const int64_t* rows, int64_t count, const Advance& advance, float* partial) {
  constexpr int64_t kHeads = Dim == 64 ? 4 : Dim == 128 ? 2 : 1;  // whose sums fit into the registers
  const int64_t group = pages.group(), stride = pages.kv_heads * Dim, each = 2 + Dim;
  for (int64_t first = 0; first < group; first += kHeads) {
    const int64_t num = std::min(kHeads, group - first);
    alignas(64) float scores[kHeads * kPiece];
    __m512 largest[kHeads];
    for (int64_t g = 0; g < num; ++g) largest[g] = _mm512_set1_ps(kNothing);
    for (int64_t i = 0; i < count; i += 16) {
      advance();
      for (int64_t g = 0; g < num; ++g) {
        const __m512 score = score_16<Dim>(keys, stride, rows + i, count - i, query + (first + g) * Dim, pages.scale);
        largest[g] = _mm512_max_ps(largest[g], score);
        _mm512_storeu_ps(scores + g * kPiece + i, score);
      }
    }
    float* out = partial + first * each;
    for (int64_t g = 0; g < num; ++g)
      to_weights(scores + g * kPiece, count, largest[g], out[g * each], out[g * each + 1]);
    switch (num) {
      case 1: weighted_values<Dim, 1>(values, stride, rows, count, scores, advance, out + 2, each); break;
      case 2: weighted_values<Dim, 2>(values, stride, rows, count, scores, advance, out + 2, each); break;
      case 3: weighted_values<Dim, 3>(values, stride, rows, count, scores, advance, out + 2, each); break;
      case 4: weighted_values<Dim, 4>(values, stride, rows, count, scores, advance, out + 2, each); break;
    }
  }
}

template <typename Advance>
inline void decode_piece(const Pages& pages, int64_t head, const bf16* query, const int64_t* rows, int64_t count,
                         const Advance& advance, float* partial) {
  const bf16 *keys = pages.keys + head * pages.head_dim, *values = pages.values + head * pages.head_dim;
  switch (pages.head_dim) {
    case 64: return decode_piece<64>(pages, keys, values, query, rows, count, advance, partial);
    case 128: return decode_piece<128>(pages, keys, values, query, rows, count, advance, partial);
    case 256: return decode_piece<256>(pages, keys, values, query, rows, count, advance, partial);
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
  DecodeAttention(Scratch& scratch, int64_t rows, const int64_t* tables, int64_t width, const int64_t* lengths,
                  int64_t heads, int64_t head_dim)
      : rows_(rows), tables_(tables), width_(width), lengths_(lengths) {
    for (int64_t row = 0; row < rows; ++row) pieces_ = std::max(pieces_, (lengths[row] + kPiece - 1) / kPiece);
    partials_ = scratch.take<float>(rows * pieces_ * heads * (2 + head_dim));
  }

  // prepare(row, kv_head, is_last) returns the queries of that KV head's group, [group][head_dim]; it is called for each
  // piece, before its keys are read, and `is_last` for the piece that ends with the row's own token.
  template <typename Prepare>
  void run(Team& team, Member& member, const Pages& pages, const Prepare& prepare, bf16* out) {
    const int64_t items = rows_ * pieces_;
    // One thread for all heads of a piece reads memory from front to back. Where there are few pieces, heads are shared.
    const int64_t together = items >= 4 * team.size() && pages.kv_heads * pages.head_dim <= 512 ? pages.kv_heads : 1;
    const int64_t parts = pages.kv_heads / together;
    const auto piece_of = [&](int64_t item) {
      return Piece{*this, pages, item / parts / pieces_, item / parts % pieces_, item % parts * together, together};
    };
    team.share_ahead(member, items * parts, 1, [&](int64_t item, int64_t next) {
      const Piece none = {*this, pages, 0, pieces_, 0, together};
      attend(pages, prepare, piece_of(item), next < items * parts ? piece_of(next) : none, out);
    });
    if (pieces_ == 1) return;
    team.share(member, rows_ * pages.heads, 4, [&](int64_t item) {
      const int64_t row = item / pages.heads, head = item % pages.heads, length = lengths_[row];
      const int64_t skipped = pages.first_seen(length - 1) / kPiece;
      const int64_t pieces = (length + kPiece - 1) / kPiece - skipped;
      const int64_t each = 2 + pages.head_dim;
      if (pieces > 1)
        join_pieces(partial(pages, row, skipped, head), pages.heads * each, pieces, pages.head_dim,
                    out + item * pages.head_dim);
    });
  }

 private:
  float* partial(const Pages& pages, int64_t row, int64_t piece, int64_t head) const {
    return partials_ + ((row * pieces_ + piece) * pages.heads + head) * (2 + pages.head_dim);
  }

  // One piece of one row for `count` KV heads from `head` on: places [begin, end) of the context.
  struct Piece {
    Piece(const DecodeAttention& all, const Pages& pages, int64_t row, int64_t number, int64_t head, int64_t count)
        : row(row),
          number(number),
          head(head),
          count(count),
          first(pages.first_seen(all.lengths_[row] - 1)),
          begin(std::max(number * kPiece, first)),
          end(std::max(begin, std::min((number + 1) * kPiece, all.lengths_[row]))) {}

    const int64_t row, number, head, count;
    const int64_t first;  // that the row sees
    const int64_t begin, end;
  };

  // While a piece is computed the next one is fetched.
  template <typename Prepare>
  void attend(const Pages& pages, const Prepare& prepare, const Piece& piece, const Piece& next, bf16* out) const {
    const int64_t group = pages.group(), dim = pages.head_dim, row = piece.row, count = piece.end - piece.begin;
    if (count == 0) return;
    int64_t rows[kPiece];
    find_rows(pages, tables_ + row * width_, piece.begin, piece.end, rows);
    Stream stream(pages, tables_ + next.row * width_, next.begin, next.end, next.head, next.count * dim);
    const int64_t parts = 2 * piece.count * ((count + 15) / 16), at_once = (next.end - next.begin + parts - 1) / parts;
    const auto advance = [&]() __attribute__((always_inline)) { stream.fetch(at_once); };
    const bool is_whole = piece.begin == piece.first && piece.end == lengths_[row];
    for (int64_t head = piece.head; head < piece.head + piece.count; ++head) {
      float* sums = partial(pages, row, piece.number, head * group);
      const bf16* query = prepare(row, head, piece.end == lengths_[row]);
      decode_piece(pages, head, query, rows, count, advance, sums);
      for (int64_t g = 0; is_whole && g < group; ++g)
        join_pieces(sums + g * (2 + dim), 0, 1, dim, out + (row * pages.heads + head * group + g) * dim);
    }
  }

  const int64_t rows_;
  const int64_t* tables_;
  const int64_t width_;
  const int64_t* lengths_;
  int64_t pieces_ = 1;
  float* partials_;
};
