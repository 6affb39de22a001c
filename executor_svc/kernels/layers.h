// All decoder layers of a Llama (norm, attention with rotary positions, norm, gated feed-forward) and the norm behind
// them in one go: one team, no dispatch between two operations. Between layers the hidden state stays float32.
#pragma once

#include "attention.h"
#include "linear.h"
#include "prefill.h"

struct Layer {
  const bf16* input_norm;      // [hidden]
  const bf16* attention_norm;  // [hidden]
  const bf16* query_key_value; // packed, [(heads + 2 kv_heads) head_dim, hidden]
  const bf16* output;          // packed, [hidden, heads head_dim]
  const bf16* gate_up;         // packed, [2 intermediate, hidden], each panel 16 of gate and the same 16 of up
  const bf16* down;            // packed, [hidden, intermediate]
  bf16* keys;                  // [blocks][block_size][kv_heads][head_dim]
  bf16* values;
  int64_t window;
};

struct Sizes {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, block_size;
  float epsilon, scale;
  const bf16* last_norm;  // [hidden]

  int64_t projected() const { return (heads + 2 * kv_heads) * head_dim; }
};

struct Step {
  int64_t is_prefill, rows;
  const int64_t* cache_rows;  // [rows], where each token's key and value go
  const int64_t* tables;      // [sequences][width]
  int64_t width;
  const int64_t* lengths;     // [sequences]
  const bf16* cosine;         // [rows][head_dim]
  const bf16* sine;
};

constexpr int kOperations = 9;  // most times that work is shared out in a layer
constexpr int64_t kOwnRows = 32;

// What one layer leaves. No thread computes a layer before all have left the one that had its memory last (team.h), and
// within a layer nothing is written by two operations.
template <typename Attention>
struct Buffers {
  Buffers(Scratch& scratch, const Sizes& sizes, int64_t rows, const Attention& attention)
      : after_attention(scratch.take<float>(rows * sizes.hidden)),
        after(scratch.take<float>(rows * sizes.hidden)),
        projected(scratch.take<float>(rows * sizes.projected())),
        normed(scratch.take<bf16>(rows > kOwnRows ? rows * sizes.hidden : 0)),
        normed_again(scratch.take<bf16>(rows > kOwnRows ? rows * sizes.hidden : 0)),
        query(scratch.take<bf16>(rows * sizes.heads * sizes.head_dim)),
        attended(scratch.take<bf16>(rows * sizes.heads * sizes.head_dim)),
        activated(scratch.take<bf16>(rows * sizes.intermediate)),
        attention(attention) {}

  static int64_t bytes(const Sizes& sizes, int64_t rows) {
    return rows * (12 * sizes.hidden + 4 * sizes.projected() + 4 * sizes.heads * sizes.head_dim + 2 * sizes.intermediate);
  }

  float *after_attention, *after, *projected;  // `after_attention` and `after`: the residual stream
  bf16 *normed, *normed_again, *query, *attended, *activated;
  Attention attention;
};

inline __m512 silu(__m512 x) {
  const __m512 negative = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(negative)));
}

inline void norm_row(const float* row, const bf16* weight, int64_t size, float epsilon, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 value = _mm512_loadu_ps(row + i);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + epsilon));
  for (int64_t i = 0; i < size; i += 16)
    store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(row + i), factor), load_bf16(weight + i)));
}

// One head: x cos + (-second half, first half) sin.
inline void rotate_head(const float* head, const bf16* cosine, const bf16* sine, int64_t dim, bf16* out) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __m512 a = _mm512_loadu_ps(head + i), b = _mm512_loadu_ps(head + half + i);
    store_bf16(out + i, _mm512_fnmadd_ps(b, load_bf16(sine + i), _mm512_mul_ps(a, load_bf16(cosine + i))));
    store_bf16(out + half + i,
               _mm512_fmadd_ps(a, load_bf16(sine + half + i), _mm512_mul_ps(b, load_bf16(cosine + half + i))));
  }
}

// Rotates the queries of one token and one KV head's group: `projected` and `query` are the token's.
inline void rotate_queries(const Sizes& sizes, const Step& step, int64_t row, int64_t head, const float* projected,
                           bf16* query) {
  const int64_t dim = sizes.head_dim, group = sizes.heads / sizes.kv_heads;
  for (int64_t i = head * group; i < (head + 1) * group; ++i)
    rotate_head(projected + i * dim, step.cosine + row * dim, step.sine + row * dim, dim, query + i * dim);
}

// Writes one token's key, rotated, and value of one KV head into the cache.
inline void write_token(const Layer& layer, const Sizes& sizes, const Step& step, int64_t row, int64_t head,
                        const float* projected) {
  const int64_t dim = sizes.head_dim, to = (step.cache_rows[row] * sizes.kv_heads + head) * dim;
  const float* key = projected + (sizes.heads + head) * dim;
  const float* value = key + sizes.kv_heads * dim;
  rotate_head(key, step.cosine + row * dim, step.sine + row * dim, dim, layer.keys + to);
  for (int64_t i = 0; i < dim; i += 16) store_bf16(layer.values + to + i, _mm512_loadu_ps(value + i));
}

// Each token is rotated and written by whoever attends to its context's last keys.
inline void attend(Team& team, Member& member, const Layer& layer, const Sizes& sizes, const Step& step,
                   const Pages& pages, Buffers<DecodeAttention>& buffers) {
  const auto prepare = [&](int64_t row, int64_t head, bool is_last) {
    const float* projected = buffers.projected + row * sizes.projected();
    if (is_last) write_token(layer, sizes, step, row, head, projected);
    thread_local std::vector<bf16> query;  // of this thread: every piece of a row rotates its queries anew
    query.resize(sizes.heads * sizes.head_dim);
    rotate_queries(sizes, step, row, head, projected, query.data());
    return query.data() + head * pages.group() * sizes.head_dim;
  };
  buffers.attention.run(team, member, pages, prepare, buffers.attended);
}

inline void attend(Team& team, Member& member, const Layer& layer, const Sizes& sizes, const Step& step,
                   const Pages& pages, Buffers<PrefillAttention>& buffers) {
  team.share(member, step.rows, 4, [&](int64_t row) {
    const float* projected = buffers.projected + row * sizes.projected();
    for (int64_t head = 0; head < sizes.kv_heads; ++head) {
      rotate_queries(sizes, step, row, head, projected, buffers.query + row * sizes.heads * sizes.head_dim);
      write_token(layer, sizes, step, row, head, projected);
    }
  });
  buffers.attention.run(team, member, pages, buffers.query, buffers.attended);
}

// The norm of all rows, for the linear layer that comes next. Few of them each thread computes for itself, which costs
// less than to wait for another.
inline const bf16* norm(Team& team, Member& member, const Sizes& sizes, int64_t rows, const float* residual,
                        const bf16* weight, bf16* shared) {
  const int64_t size = sizes.hidden;
  if (rows > kOwnRows) {
    team.share(member, rows, 4, [&](int64_t row) {
      norm_row(residual + row * size, weight, size, sizes.epsilon, shared + row * size);
    });
    return shared;
  }
  thread_local std::vector<bf16> own;
  if (team.is_over(member)) return own.data();  // nobody reads it
  own.resize(rows * size);
  for (int64_t row = 0; row < rows; ++row)
    norm_row(residual + row * size, weight, size, sizes.epsilon, own.data() + row * size);
  return own.data();
}

// out = before + input times weight.
inline void add_linear(Team& team, Member& member, const bf16* input, int64_t rows, int64_t inputs, const bf16* weight,
                       const float* before, int64_t hidden, float* out) {
  linear(team, member, input, rows, inputs, weight, hidden, [&](int64_t row, int64_t column, __m512 sum) {
    if (column >= hidden) return;
    const int64_t place = row * hidden + column;
    _mm512_storeu_ps(out + place, _mm512_add_ps(_mm512_loadu_ps(before + place), sum));
  });
}

template <typename Attention>
inline void run_layer(Team& team, Member& member, const Layer& layer, const Sizes& sizes, const Step& step,
                      const float* before, Buffers<Attention>& buffers) {
  const int64_t rows = step.rows, hidden = sizes.hidden, width = sizes.heads * sizes.head_dim;
  const int64_t projected = sizes.projected();
  const bf16* normed = norm(team, member, sizes, rows, before, layer.input_norm, buffers.normed);
  linear(team, member, normed, rows, hidden, layer.query_key_value, projected,
         [&](int64_t row, int64_t column, __m512 sum) {
           if (column < projected) _mm512_storeu_ps(buffers.projected + row * projected + column, sum);
         });
  const Pages pages{layer.keys,  layer.values,   sizes.block_size, sizes.kv_heads,
                    sizes.heads, sizes.head_dim, sizes.scale,      layer.window};
  attend(team, member, layer, sizes, step, pages, buffers);
  add_linear(team, member, buffers.attended, rows, width, layer.output, before, hidden, buffers.after_attention);
  normed = norm(team, member, sizes, rows, buffers.after_attention, layer.attention_norm, buffers.normed_again);
  team.share(member, 2 * sizes.intermediate / kPanel, 1, [&](int64_t panel) {
    const bf16* weight = layer.gate_up + panel * kPanel * hidden;
    panel_product(normed, hidden, rows, hidden, weight, [&](int64_t row, __m512 gate, __m512 up) {
      store_bf16(buffers.activated + row * sizes.intermediate + panel * 16, _mm512_mul_ps(silu(gate), up));
    });
  });
  add_linear(team, member, buffers.activated, rows, sizes.intermediate, layer.down, buffers.after_attention, hidden,
             buffers.after);
}

// `hidden` is [rows][hidden] and goes from the embeddings to the normed last state.
template <typename Attention>
inline void run_layers(int threads, const Layer* layers, int64_t num_layers, const Sizes& sizes, const Step& step,
                       Scratch& scratch, const Attention& make_attention, bf16* hidden) {
  using Memory = Buffers<decltype(make_attention())>;
  const int64_t size = step.rows * sizes.hidden;
  float* embedded = scratch.take<float>(size);
  for (int64_t i = 0; i < size; i += 16) _mm512_storeu_ps(embedded + i, load_bf16(hidden + i));
  // Of one thread's memory the cache holds most if there is little of it; several may be this many layers apart.
  const int64_t most = std::max<int64_t>(3, (4 << 20) / Memory::bytes(sizes, step.rows));
  const int64_t num_buffers = threads == 1 ? 1 : std::min(most, num_layers);
  std::vector<Memory> buffers;
  for (int64_t i = 0; i < num_buffers; ++i) buffers.emplace_back(scratch, sizes, step.rows, make_attention());
  with_team(threads, num_layers * kOperations + 1, [&](Team& team, Member& member) {
    const float* before = embedded;
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      // A thread reads what the layer before its own left, so the one behind the memory's last must be left too.
      if (threads > 1 && layer >= num_buffers)
        team.wait_until_left(member, member.operation / layer * (layer - num_buffers + 2));
      Memory& own = buffers[layer % num_buffers];
      run_layer(team, member, layers[layer], sizes, step, before, own);
      before = own.after;
    }
    team.share(member, step.rows, 1, [&](int64_t row) {
      const int64_t begin = row * sizes.hidden;
      norm_row(before + begin, sizes.last_norm, sizes.hidden, sizes.epsilon, hidden + begin);
    });
  });
}
