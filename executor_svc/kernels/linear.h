// Products of a few rows with a large bfloat16 weight, which is read once and in the order it lies in memory.
//
// A weight of [outputs, inputs] is packed into panels of 32 outputs: [panel][inputs / 2][32][2], the order in which the
// pairwise dot product takes it. Outputs beyond the last whole panel are zero weights.
#pragma once

#include "team.h"
#include "vectors.h"

constexpr int kPanel = 32;
constexpr int kRows = 12;  // rows at once: 24 sums, two weights and one input fill the 32 registers

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

inline void pack_panel(const bf16* weight, int64_t outputs, int64_t inputs, int64_t panel, bf16* packed) {
  bf16* to = packed + panel * kPanel * inputs;
  for (int64_t k = 0; k < inputs; k += 2)
    for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n, to += 2) {
      to[0] = n < outputs ? weight[n * inputs + k] : 0;
      to[1] = n < outputs ? weight[n * inputs + k + 1] : 0;
    }
}

// What becomes of the sums of one row and one panel, `low` of its first 16 outputs and `high` of the others.
template <int Num, typename Finish>
inline void panel_rows(const bf16* input, int64_t stride, int64_t inputs, const bf16* panel, int64_t row,
                       const Finish& finish) {
  __m512 low[Num], high[Num];
  for (int r = 0; r < Num; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2) {
    const __m512bh first = load_pairs(panel + k * kPanel), second = load_pairs(panel + k * kPanel + 32);
    for (int r = 0; r < Num; ++r) {
      const __m512bh pair = broadcast_pair(input + (row + r) * stride + k);
      low[r] = _mm512_dpbf16_ps(low[r], pair, first);
      high[r] = _mm512_dpbf16_ps(high[r], pair, second);
    }
  }
  for (int r = 0; r < Num; ++r) finish(row + r, low[r], high[r]);
}

template <typename Finish>
inline void panel_product(const bf16* input, int64_t stride, int64_t rows, int64_t inputs, const bf16* panel,
                          const Finish& finish) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) panel_rows<kRows>(input, stride, inputs, panel, row, finish);
  switch (rows - row) {
#define CASE(n) case n: panel_rows<n>(input, stride, inputs, panel, row, finish); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
#undef CASE
  }
}

// Every row times every panel, shared out by panels. `finish(row, column, sum)` gets 16 outputs from `column` on, also
// those beyond `outputs`.
template <typename Finish>
inline void linear(Team& team, Member& member, const bf16* input, int64_t rows, int64_t inputs, const bf16* packed,
                   int64_t outputs, const Finish& finish) {
  const int64_t panels = panels_of(outputs);
  team.share(member, panels, panels >= 256 && rows <= 64 ? 4 : 1, [&](int64_t panel) {
    const int64_t column = panel * kPanel;
    panel_product(input, inputs, rows, inputs, packed + column * inputs, [&](int64_t row, __m512 low, __m512 high) {
      finish(row, column, low);
      finish(row, column + 16, high);
    });
  });
}
