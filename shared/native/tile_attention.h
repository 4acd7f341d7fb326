// Attention by tiles: rows of queries of one KV head, over keys and values that are packed like weights.
//
// The softmax over parts of the tokens follows FlashAttention-2 (Dao 2023, arXiv:2307.08691): a part with a
// greater score scales the sums of the earlier parts down.
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

// Maximum number of query rows at a time. They share the packing of each chunk of the cache.
constexpr int kTileAttentionRows = 512;
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
    const size_t rows = padded(num_rows, kRowsAtOnce);
    queries_.assign(rows * query_dim_, T{});
    sums_.assign(rows * value_dim_, 0.0f);
    std::fill_n(greatest_, num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(totals_, num_rows, 0.0f);
  }

  // Units of a query, rounded up to whole tiles. Units after head_dim are 0, and must be finite in the keys.
  int units() const { return query_dim_ / Unit<T>::kSize; }
  T* query(int row) { return &queries_[size_t(row) * query_dim_]; }

  // Adds a chunk. `span(row)` returns the tokens of the whole context that a row sees. A later row never begins or
  // ends before an earlier row.
  template <class See>
  void add(const Tiles& tiles, const Chunk& chunk, float scale, See&& span) {
    constexpr float kLog2E = 1.44269504088896341f;
    for (int row = 0; row < num_rows_; row += kRowsAtOnce) {
      const int count = std::min(kRowsAtOnce, num_rows_ - row);
      const int first = span(row).first - chunk.first_token, stop = span(row + count - 1).stop - chunk.first_token;
      for (int token = 0; token < std::min(stop, chunk.width); token += kTokensAtOnce) {
        const int width = std::min(kTokensAtOnce, chunk.width - token);
        if (token + width <= first) continue;
        score(tiles, row, count, chunk.keys + size_t(token) * units(), width);
        for (int i = 0; i < count; ++i) {
          const Span visible = span(row + i);
          const int begin = chunk.first_token + token;
          const Span part{std::clamp(visible.first - begin, 0, width), std::clamp(visible.stop - begin, 0, width)};
          weigh(row + i, i, part, width, scale * kLog2E);
        }
        sum(tiles, row, count, chunk, token, width);
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
  // With these numbers of rows and tokens, scores and weights take 48 KiB and stay in a near cache.
  static constexpr int kRowsAtOnce = 2 * kTileSide, kTokensAtOnce = 256;
  // Rows that are no power of two apart do not compete for the same sets of the cache.
  static constexpr int kScoreStride = kTokensAtOnce + kLanes, kProbStride = kTokensAtOnce + 2 * kLanes;

  static TileRows rows(const T* first, int count, int stride) {
    const auto at = [&](int row) { return reinterpret_cast<const uint32_t*>(first + size_t(row) * stride); };
    return {at(0), count > kTileSide ? at(kTileSide) : nullptr, stride / Unit<T>::kSize};
  }

  void score(const Tiles& tiles, int row, int count, const uint32_t* keys, int width) {
    const TileRows queries = rows(query(row), count, query_dim_);
    for (int token = 0; token < width; token += kPanel) {
      tiles.multiply<false>(queries, keys + size_t(token) * units(), units(), {&scores_[0][token], kScoreStride});
    }
  }

  void sum(const Tiles& tiles, int row, int count, const Chunk& chunk, int token, int width) {
    constexpr int size = Unit<T>::kSize;
    const TileRows weights = rows(probs_[0], count, kProbStride);
    for (int dim = 0; dim < value_dim_; dim += kPanel) {
      const uint32_t* values = chunk.values + dim / kPanel * chunk.value_stride + size_t(token / size) * kPanel;
      tiles.multiply_add<false>(weights, values, width / size, {&sums_[size_t(row) * value_dim_ + dim], value_dim_});
    }
  }

  // Turns the scores of a row into weights relative to its greatest score so far. `place` is the row's index in the
  // buffers, and `scale` turns scores into exponents of 2.
  void weigh(int row, int place, Span span, int width, float scale) {
    float* scores = scores_[place];
    std::fill(scores, scores + span.first, -std::numeric_limits<float>::infinity());
    std::fill(scores + span.stop, scores + width, -std::numeric_limits<float>::infinity());
    __m512 chunk_greatest = load16(scores);
    for (int i = kLanes; i < width; i += kLanes) chunk_greatest = _mm512_max_ps(chunk_greatest, load16(scores + i));
    const float before = greatest_[row];
    const float greatest = std::max(before, _mm512_reduce_max_ps(chunk_greatest) * scale);
    T* probs = probs_[place];
    if (greatest == -std::numeric_limits<float>::infinity()) {  // the row has seen no token yet
      std::fill_n(probs, width, T{});
      return;
    }
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(greatest);
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < width; i += 2 * kLanes) {
      const __m512 low = power_of_two(_mm512_fmsub_ps(load16(scores + i), factor, shift));
      const __m512 high = power_of_two(_mm512_fmsub_ps(load16(scores + i + kLanes), factor, shift));
      total = _mm512_add_ps(total, _mm512_add_ps(low, high));
      store_all(probs + i, low, high);
    }
    if (greatest > before) shrink(row, before - greatest);
    greatest_[row] = greatest;
    totals_[row] += _mm512_reduce_add_ps(total);
  }

  // Multiplies a row's sums so far with 2^exponent.
  void shrink(int row, float exponent) {
    const __m512 factor = power_of_two(_mm512_set1_ps(exponent));
    totals_[row] *= _mm512_cvtss_f32(factor);
    float* sums = &sums_[size_t(row) * value_dim_];
    for (int dim = 0; dim < value_dim_; dim += kLanes) store16(sums + dim, _mm512_mul_ps(load16(sums + dim), factor));
  }

  int num_rows_ = 0, head_dim_ = 0, query_dim_ = 0, value_dim_ = 0;
  // Greatest scores, as exponents of 2.
  float greatest_[kTileAttentionRows], totals_[kTileAttentionRows];
  std::vector<T> queries_;
  std::vector<float> sums_;
  alignas(64) float scores_[kRowsAtOnce][kScoreStride];
  alignas(64) T probs_[kRowsAtOnce][kProbStride] = {};
};

}  // namespace pagemill
