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

constexpr int kPhases = 9;          // most times that work is shared out in a layer
constexpr int64_t kOwnRows = 32;

struct Buffers {
  Buffers(const Sizes& sizes, int64_t rows, const bf16* hidden)
      : residual(rows * sizes.hidden),
        projected(rows * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim),
        normed(rows * sizes.hidden),
        query(rows * sizes.heads * sizes.head_dim),
        attended(query.size()),
        activated(rows * sizes.intermediate) {
    for (size_t i = 0; i < residual.size(); i += 16) _mm512_storeu_ps(residual.data() + i, load_bf16(hidden + i));
  }
  std::vector<float> residual, projected;
  std::vector<bf16> normed, query, attended, activated;
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
inline void attend(Team& team, int& counter, const Layer& layer, const Sizes& sizes, const Step& step,
                   const Pages& pages, DecodeAttention& attention, Buffers& buffers) {
  const int64_t width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim;
  const auto prepare = [&](int64_t row, int64_t head, bool is_last) {
    const float* projected = buffers.projected.data() + row * width;
    if (is_last) write_token(layer, sizes, step, row, head, projected);
    thread_local std::vector<bf16> query;  // of this thread: every piece of a row rotates its queries anew
    query.resize(sizes.heads * sizes.head_dim);
    rotate_queries(sizes, step, row, head, projected, query.data());
    return query.data() + head * pages.group() * sizes.head_dim;
  };
  attention.run(team, counter, pages, prepare, buffers.attended.data());
}

inline void attend(Team& team, int& counter, const Layer& layer, const Sizes& sizes, const Step& step,
                   const Pages& pages, PrefillAttention& attention, Buffers& buffers) {
  const int64_t width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim;
  team.share(counter, step.rows, 4, [&](int64_t row) {
    const float* projected = buffers.projected.data() + row * width;
    for (int64_t head = 0; head < sizes.kv_heads; ++head) {
      rotate_queries(sizes, step, row, head, projected, buffers.query.data() + row * sizes.heads * sizes.head_dim);
      write_token(layer, sizes, step, row, head, projected);
    }
  });
  attention.run(team, counter, pages, buffers.query.data(), buffers.attended.data());
}

// The norm of all rows. Few of them each thread computes for itself, which costs less than to wait for another.
inline const bf16* norm(Team& team, int& counter, const Sizes& sizes, int64_t rows, const bf16* weight,
                        Buffers& buffers) {
  const int64_t size = sizes.hidden;
  const float* residual = buffers.residual.data();
  if (rows <= kOwnRows) {
    thread_local std::vector<bf16> own;
    own.resize(rows * size);
    for (int64_t row = 0; row < rows; ++row)
      norm_row(residual + row * size, weight, size, sizes.epsilon, own.data() + row * size);
    return own.data();
  }
  bf16* normed = buffers.normed.data();
  team.share(counter, rows, 4, [&](int64_t row) {
    norm_row(residual + row * size, weight, size, sizes.epsilon, normed + row * size);
  });
  return normed;
}

template <typename Attention>
inline void run_layer(Team& team, int& counter, const Layer& layer, const Sizes& sizes, const Step& step,
                      Attention& attention, Buffers& buffers) {
  const int64_t rows = step.rows, hidden = sizes.hidden, width = sizes.heads * sizes.head_dim;
  const int64_t projected = width + 2 * sizes.kv_heads * sizes.head_dim;
  const auto add = [&](int64_t row, int64_t column, __m512 sum) {
    if (column >= hidden) return;
    float* to = buffers.residual.data() + row * hidden + column;
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
  };
  const bf16* normed = norm(team, counter, sizes, rows, layer.input_norm, buffers);
  linear(team, counter, normed, rows, hidden, layer.query_key_value, projected,
         [&](int64_t row, int64_t column, __m512 sum) {
           if (column < projected) _mm512_storeu_ps(buffers.projected.data() + row * projected + column, sum);
         });
  const Pages pages{layer.keys,  layer.values,   sizes.block_size, sizes.kv_heads,
                    sizes.heads, sizes.head_dim, sizes.scale,      layer.window};
  attend(team, counter, layer, sizes, step, pages, attention, buffers);
  linear(team, counter, buffers.attended.data(), rows, width, layer.output, hidden, add);
  normed = norm(team, counter, sizes, rows, layer.attention_norm, buffers);
  team.share(counter, 2 * sizes.intermediate / kPanel, 1, [&](int64_t panel) {
    const bf16* weight = layer.gate_up + panel * kPanel * hidden;
    panel_product(normed, hidden, rows, hidden, weight, [&](int64_t row, __m512 gate, __m512 up) {
      store_bf16(buffers.activated.data() + row * sizes.intermediate + panel * 16, _mm512_mul_ps(silu(gate), up));
    });
  });
  linear(team, counter, buffers.activated.data(), rows, sizes.intermediate, layer.down, hidden, add);
}

template <typename Attention>
inline void run_layers(Team& team, int& counter, const Layer* layers, int64_t num_layers, const Sizes& sizes,
                       const Step& step, Attention& attention, Buffers& buffers, bf16* hidden) {
  for (int64_t layer = 0; layer < num_layers; ++layer)
    run_layer(team, counter, layers[layer], sizes, step, attention, buffers);
  team.share(counter, step.rows, 1, [&](int64_t row) {
    const int64_t begin = row * sizes.hidden;
    norm_row(buffers.residual.data() + begin, sizes.last_norm, sizes.hidden, sizes.epsilon, hidden + begin);
  });
}
