// What Python calls (native.py): plain functions over memory that torch owns. No header of torch is needed, so that it
// compiles in seconds.
#include "attention.h"
#include "draw.h"
#include "layers.h"
#include "linear.h"
#include "prefill.h"
#include "rank.h"

namespace {

// Each caller's thread has its own; the pool lets in one caller at a time.
Scratch& begin_scratch() {
  thread_local Scratch scratch;
  scratch.begin();
  return scratch;
}

}  // namespace

extern "C" {

void holdback_pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed, int threads) {
  with_team(threads, 1, [&](Team& team, Member& member) {
    team.share(member, panels_of(outputs), 1,
               [&](int64_t panel) { pack_panel(weight, outputs, inputs, panel, packed); });
  });
}

void holdback_linear(const bf16* input, int64_t rows, int64_t inputs, const bf16* packed, int64_t outputs,
                     const bf16* bias, void* out, int is_float, int threads) {
  with_team(threads, 1, [&](Team& team, Member& member) {
    linear(team, member, input, rows, inputs, packed, outputs, [&](int64_t row, int64_t column, __m512 sum) {
      const int64_t count = std::min<int64_t>(16, outputs - column);
      if (count <= 0) return;
      const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
      if (bias != nullptr)
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(
                                     _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias + column)), 16)));
      if (is_float) _mm512_mask_storeu_ps(static_cast<float*>(out) + row * outputs + column, mask, sum);
      else _mm256_mask_storeu_epi16(static_cast<bf16*>(out) + row * outputs + column, mask,
                                    (__m256i)_mm512_cvtneps_pbh(sum));
    });
  });
}

// The largest of each row, the first among equals, and whether all of the row is finite.
void holdback_rank(const float* logits, int64_t rows, int64_t size, int64_t* largest, uint8_t* is_finite, int threads) {
  with_team(rows > 1 ? threads : 1, 1, [&](Team& team, Member& member) {
    team.share(member, rows, 1,
               [&](int64_t row) { is_finite[row] = rank_row(logits + row * size, size, largest[row]); });
  });
}

// A token for each row of logits, with the parameters of each.
void holdback_draw(const float* logits, int64_t rows, int64_t size, const float* temperature, const float* top_p,
                   const float* min_p, const int64_t* top_k, const float* uniform, int64_t* tokens, int threads) {
  with_team(rows > 1 ? threads : 1, 1, [&](Team& team, Member& member) {
    Draw draw(size);
    team.share(member, rows, 1, [&](int64_t row) {
      const DrawParams params{temperature[row], top_p[row], min_p[row], top_k[row]};
      tokens[row] = draw.row(logits + row * size, params, uniform[row]);
    });
  });
}

void holdback_decode_attention(const Pages* pages, int64_t rows, const int64_t* tables, int64_t width,
                               const int64_t* lengths, const bf16* query, bf16* out, int threads) {
  DecodeAttention attention(begin_scratch(), rows, tables, width, lengths, pages->heads, pages->head_dim);
  const auto find = [&](int64_t row, int64_t head, bool) {
    return query + (row * pages->heads + head * pages->group()) * pages->head_dim;
  };
  with_team(threads, 2, [&](Team& team, Member& member) { attention.run(team, member, *pages, find, out); });
}

void holdback_prefill_attention(const Pages* pages, int64_t tokens, int64_t start, const int64_t* table,
                                const bf16* query, bf16* out, int threads) {
  PrefillAttention attention(begin_scratch(), tokens, start, table, pages->kv_heads, pages->head_dim);
  with_team(threads, 2, [&](Team& team, Member& member) { attention.run(team, member, *pages, query, out); });
}

void holdback_layers(const Layer* layers, int64_t num_layers, const Sizes* sizes, const Step* step, bf16* hidden,
                     int threads) {
  Scratch& scratch = begin_scratch();
  const auto run = [&](const auto& make_attention) {
    run_layers(threads, layers, num_layers, *sizes, *step, scratch, make_attention, hidden);
  };
  if (step->is_prefill)
    run([&] {
      return PrefillAttention(scratch, step->rows, step->lengths[0] - step->rows, step->tables, sizes->kv_heads,
                              sizes->head_dim);
    });
  else
    run([&] {
      return DecodeAttention(scratch, step->rows, step->tables, step->width, step->lengths, sizes->heads,
                             sizes->head_dim);
    });
}

}  // extern "C"
