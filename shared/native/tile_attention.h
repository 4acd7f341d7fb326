// Attention by tiles: rows of queries of one KV head, over keys and values that are packed like weights.
//
// Tokens come in chunks, so that scores and probabilities stay in the L2 cache. The softmax over chunks is that
// of FlashAttention-2 (Dao 2023, arXiv:2307.08691): a chunk with a greater score scales the sums so far down.
#pragma once

#include <limits>
#include <vector>

#include "linear.h"

namespace pagemill {

// Tokens [first, stop), which a query row may see.
struct Span {
  int first;
  int stop;
};

// Most rows of queries at a time: packing a chunk of a cache is shared by so many.
constexpr int kTileAttentionRows = 128;
constexpr int kChunkTokens = 512;

// Keys [width / 32][units][32 tokens] and values [value_dim / 32][value_stride], each [width / 2][32 dimensions].
struct Chunk {
  const uint32_t *keys, *values;
  size_t value_stride;
  int first_token, width;  // a multiple of 32, at most kChunkTokens
};

// One thread's buffers. The order of calls is `begin`, writes to `query`, `add` for each chunk, `take`.
template <class T>
class TileAttention {
 public:
  void begin(int num_rows, int head_dim) {
    num_rows_ = num_rows;
    head_dim_ = head_dim;
    query_dim_ = padded(head_dim, kTileSide * Unit<T>::kSize);
    value_dim_ = padded(head_dim, kPanel);
    queries_.assign(size_t(kTileAttentionRows) * query_dim_, T{});
    sums_.assign(size_t(kTileAttentionRows) * value_dim_, 0.0f);
    scores_.resize(size_t(kTileAttentionRows) * kScoreStride);
    probs_.resize(size_t(kTileAttentionRows) * kProbStride);
    std::fill_n(greatest_, num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(totals_, num_rows, 0.0f);
  }

  // Units of a query, which are whole tiles: those behind head_dim are 0, and must be finite in the keys.
  int units() const { return query_dim_ / Unit<T>::kSize; }
  T* query(int row) { return &queries_[size_t(row) * query_dim_]; }

  // Adds a chunk; `span(row)` is what a row sees of the whole context.
  template <class See>
  void add(const Tiles& tiles, const Chunk& chunk, float scale, See&& span) {
    constexpr int size = Unit<T>::kSize;
    for (int row = 0; row < num_rows_; row += 2 * kTileSide) {
      float* scores = &scores_[size_t(row) * kScoreStride];
      for (int token = 0; token < chunk.width; token += kPanel) {
        const uint32_t* keys = chunk.keys + size_t(token) * units();
        tiles.multiply(rows(queries_, query_dim_, row), keys, units(), {scores + token, kScoreStride});
      }
    }
    for (int row = 0; row < num_rows_; ++row) {
      const Span seen = span(row);
      weigh(row, {std::clamp(seen.first - chunk.first_token, 0, chunk.width), std::clamp(seen.stop - chunk.first_token, 0, chunk.width)},
            chunk.width, scale);
    }
    for (int dim = 0; dim < value_dim_; dim += kPanel) {
      const uint32_t* values = chunk.values + dim / kPanel * chunk.value_stride;
      for (int row = 0; row < num_rows_; row += 2 * kTileSide) {
        tiles.multiply_add(rows(probs_, kProbStride, row), values, chunk.width / size,
                           {&sums_[size_t(row) * value_dim_ + dim], value_dim_});
      }
    }
  }

  // Writes a row's result [head_dim].
  void take(int row, T* to) const {
    const __m512 factor = _mm512_set1_ps(1.0f / totals_[row]);
    const float* sums = &sums_[size_t(row) * value_dim_];
    for (int dim = 0; dim < head_dim_; dim += kPanel) {
      store32(to + dim, head_dim_ - dim, _mm512_mul_ps(load16(sums + dim), factor),
              _mm512_mul_ps(load16(sums + dim + kLanes), factor));
    }
  }

 private:
  // Rows that are no power of two apart do not compete for the same sets of the L1 cache.
  static constexpr int kScoreStride = kChunkTokens + kLanes;
  static constexpr int kProbStride = kChunkTokens + 2 * kLanes;

  // The rows from `row` on: 32, or 16 if there are no more.
  TileRows rows(const std::vector<T>& numbers, int stride, int row) const {
    const auto at = [&](int which) { return reinterpret_cast<const uint32_t*>(&numbers[size_t(which) * stride]); };
    return {at(row), num_rows_ - row > kTileSide ? at(row + kTileSide) : nullptr, stride / Unit<T>::kSize};
  }

  // Turns a row's scores into weights relative to its greatest score so far.
  void weigh(int row, Span seen, int width, float scale) {
    float* scores = &scores_[size_t(row) * kScoreStride];
    std::fill(scores, scores + seen.first, -std::numeric_limits<float>::infinity());
    std::fill(scores + seen.stop, scores + width, -std::numeric_limits<float>::infinity());
    __m512 chunk_greatest = load16(scores);
    for (int i = kLanes; i < width; i += kLanes) chunk_greatest = _mm512_max_ps(chunk_greatest, load16(scores + i));
    const float before = greatest_[row];
    const float greatest = std::max(before, _mm512_reduce_max_ps(chunk_greatest) * scale);
    T* probs = &probs_[size_t(row) * kProbStride];
    if (greatest == -std::numeric_limits<float>::infinity()) {  // nothing has been seen yet
      std::fill_n(probs, width, T{});
      return;
    }
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(greatest);
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < width; i += kLanes) {
      const __m512 weight = exp16(_mm512_fmsub_ps(load16(scores + i), factor, shift));
      total = _mm512_add_ps(total, weight);
      store16(probs + i, weight);
    }
    if (greatest > before) shrink(row, before - greatest);
    greatest_[row] = greatest;
    totals_[row] += _mm512_reduce_add_ps(total);
  }

  // Multiplies a row's sums so far with e^exponent.
  void shrink(int row, float exponent) {
    const __m512 factor = exp16(_mm512_set1_ps(exponent));
    totals_[row] *= _mm512_cvtss_f32(factor);
    float* sums = &sums_[size_t(row) * value_dim_];
    for (int dim = 0; dim < value_dim_; dim += kLanes) store16(sums + dim, _mm512_mul_ps(load16(sums + dim), factor));
  }

  int num_rows_ = 0, head_dim_ = 0, query_dim_ = 0, value_dim_ = 0;
  float greatest_[kTileAttentionRows], totals_[kTileAttentionRows];
  std::vector<T> queries_, probs_;
  std::vector<float> scores_, sums_;
};

}  // namespace pagemill
