// Attention over the paged KV cache, for up to 12 query rows at a time that share one KV head: all
// query heads of the group, for one token of a decode or for adjacent tokens of a chunk.
//
// Blocks are stored in the order in which the kernels read them, in groups of eight tokens:
//
//   keys    [num_kv_heads, block_size / 8, head_dim / size, 8, size]
//   values  [num_kv_heads, block_size / size, value_dim, size]
//
// where `size` is the number of elements in a unit. For scores, 16 tokens fill a register and each unit
// of a query is multiplied with all of them. For sums over values, 16 dimensions fill a register.
// Neither product adds across lanes.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "tile_attention.h"

namespace pagemill {

constexpr int kGroup = 8;  // tokens
constexpr int kMaxHeadDim = 512;

struct Shape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int value_dim;  // head_dim, rounded up to whole panels
  int block_size;
};

// Position of a token in the cache: its block, and its offset in the block.
struct Slot {
  int block;
  int offset;
};

template <class T>
struct Cache {
  T* keys;
  T* values;
  Shape shape;

  size_t key_block() const { return size_t(shape.num_kv_heads) * shape.block_size * shape.head_dim; }
  size_t value_block() const { return size_t(shape.num_kv_heads) * shape.block_size * shape.value_dim; }

  // Keys of the eight tokens that begin at the slot.
  const uint32_t* key_group(Slot slot, int head) const {
    const T* from = keys + slot.block * key_block() + size_t(head * shape.block_size + slot.offset) * shape.head_dim;
    return reinterpret_cast<const uint32_t*>(from);
  }
  const uint32_t* value_group(Slot slot, int head) const {
    const T* from = values + slot.block * value_block() + size_t(head * shape.block_size + slot.offset) * shape.value_dim;
    return reinterpret_cast<const uint32_t*>(from);
  }

  // Writes one token's key [head_dim] and value [value_dim].
  void write(Slot slot, int head, const T* key, const T* value) {
    constexpr int size = Unit<T>::kSize;
    const int in_group = slot.offset % kGroup, in_unit = slot.offset % size;
    auto* to = const_cast<uint32_t*>(key_group({slot.block, slot.offset - in_group}, head)) + in_group;
    for (int unit = 0; unit < shape.head_dim / size; ++unit) {
      std::memcpy(to + unit * kGroup, key + unit * size, sizeof(uint32_t));
    }
    to = const_cast<uint32_t*>(value_group({slot.block, slot.offset - in_unit}, head));
    for (int dim = 0; dim < shape.value_dim; dim += kLanes) Unit<T>::place(to + dim, value + dim, in_unit);
  }
};

// Rotates a head in place; its two halves are the coordinates of each pair, as in GPT-NeoX.
inline void rotate(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int dim = 0; dim < half; ++dim) {
    const float first = x[dim], second = x[dim + half];
    x[dim] = first * cos[dim] - second * sin[dim];
    x[dim + half] = second * cos[dim + half] + first * sin[dim + half];
  }
}

// Buffers of one thread, which grow with the longest context that it has processed.
template <class T>
struct Scratch {
  std::vector<float> scores;
  std::vector<T> probs;
  std::vector<const uint32_t*> keys, values;
  // Of a chunk, packed for tiles.
  std::vector<uint32_t> packed_keys, packed_values;
  TileAttention<T> tiles;
};

template <class T>
inline typename Unit<T>::Operand load_two(const uint32_t* low, const uint32_t* high) {
  return Unit<T>::combine(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
}

// Computes the scores of all rows with the 32 tokens of four groups, and prefetches the keys of `ahead`
// and the values of `later`, four groups each.
template <class T, int kRows>
inline void score_tile(const uint32_t* const* queries, const uint32_t* const* groups, const uint32_t* const* ahead,
                       const uint32_t* const* later, int units, float scale, float* scores, size_t width) {
  __m512 low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int unit = 0; unit < units; ++unit) {
    const auto keys_low = load_two<T>(groups[0] + unit * kGroup, groups[1] + unit * kGroup);
    const auto keys_high = load_two<T>(groups[2] + unit * kGroup, groups[3] + unit * kGroup);
    // Each unit takes half a cache line of each group.
    const int line = unit / 2 * 2 * kGroup, one = unit % 2;
    _mm_prefetch(ahead[one] + line, _MM_HINT_T0);
    _mm_prefetch(ahead[2 + one] + line, _MM_HINT_T0);
    _mm_prefetch(later[one] + line, _MM_HINT_T1);
    _mm_prefetch(later[2 + one] + line, _MM_HINT_T1);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const auto query = Unit<T>::repeat(queries[row][unit]);
      low[row] = Unit<T>::dot(low[row], query, keys_low);
      high[row] = Unit<T>::dot(high[row], query, keys_high);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    store16(scores + row * width, _mm512_mul_ps(low[row], _mm512_set1_ps(scale)));
    store16(scores + row * width + kLanes, _mm512_mul_ps(high[row], _mm512_set1_ps(scale)));
  }
}

// Computes the weighted sums over the values of all groups, for 32 dimensions from `dim` on.
template <class T, int kRows, class Take>
inline void value_tile(const T* probs, size_t width, const uint32_t* const* groups, int num_groups, int value_dim,
                       int dim, Take&& take) {
  constexpr int units = kGroup / Unit<T>::kSize;
  const auto* weights = reinterpret_cast<const uint32_t*>(probs);
  const size_t row_units = width / Unit<T>::kSize;
  __m512 low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int group = 0; group < num_groups; ++group) {
    const uint32_t* ahead = groups[group + 4 < num_groups ? group + 4 : group] + dim;
    for (int unit = 0; unit < units; ++unit) {
      const uint32_t* values = groups[group] + size_t(unit) * value_dim + dim;
      const auto values_low = Unit<T>::load(values);
      const auto values_high = Unit<T>::load(values + kLanes);
      _mm_prefetch(ahead + size_t(unit) * value_dim, _MM_HINT_T0);
      _mm_prefetch(ahead + size_t(unit) * value_dim + kLanes, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const auto weight = Unit<T>::repeat(weights[row * row_units + group * units + unit]);
        low[row] = Unit<T>::dot(low[row], weight, values_low);
        high[row] = Unit<T>::dot(high[row], weight, values_high);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) take(row, low[row], high[row]);
}

// Writes unnormalised probabilities and returns their sum. Tokens outside of the span get 0.
template <class T>
inline float softmax_row(float* scores, int width, Span visible, T* probs) {
  for (int i = 0; i < visible.first; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  for (int i = visible.stop; i < width; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  __m512 greatest = load16(scores);
  for (int i = kLanes; i < width; i += kLanes) greatest = _mm512_max_ps(greatest, load16(scores + i));
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(greatest));
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < width; i += kLanes) {
    const __m512 weight = exp16(_mm512_sub_ps(load16(scores + i), shift));
    sum = _mm512_add_ps(sum, weight);
    store16(probs + i, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// Query rows of a sequence and KV head, from `first_row` on. Rows are numbered by new token, and within a token
// by head of the group.
struct QueryRows {
  int head, first_position, first_row, window;

  QueryRows from(int row) const { return {head, first_position, first_row + row, window}; }

  // Where a row's query begins, in numbers.
  size_t place(const Shape& shape, int row) const {
    const int group = shape.num_heads / shape.num_kv_heads;
    const int query_head = head * group + (first_row + row) % group;
    return (size_t(token(shape, row)) * shape.num_heads + query_head) * shape.head_dim;
  }
  Span span(const Shape& shape, int row) const {
    const int stop = first_position + token(shape, row) + 1;
    return {window > 0 && stop > window ? stop - window : 0, stop};
  }

 private:
  int token(const Shape& shape, int row) const { return (first_row + row) / (shape.num_heads / shape.num_kv_heads); }
};

// Computes the attention of kRows query rows.
template <class T, int kRows>
void attend_tile(const Cache<T>& cache, const T* queries, T* output, const int* block_table, const QueryRows& query_rows,
                 float scale, Scratch<T>& scratch) {
  const Shape& shape = cache.shape;
  const int head = query_rows.head;
  size_t places[kRows];
  Span spans[kRows];
  const uint32_t* rows[kRows];
  for (int row = 0; row < kRows; ++row) {
    places[row] = query_rows.place(shape, row);
    rows[row] = reinterpret_cast<const uint32_t*>(queries + places[row]);
    spans[row] = query_rows.span(shape, row);
  }
  // Tokens [begin, begin + width) are whole groups, and cover all tokens that any row sees.
  const int begin = spans[0].first / kGroup * kGroup;
  const int num_groups = (spans[kRows - 1].stop - begin + kGroup - 1) / kGroup;
  const int num_quads = (num_groups + 3) / 4;
  const int width = num_quads * kPanel;
  if (scratch.scores.size() < size_t(kTileRows) * width) {
    scratch.scores.resize(size_t(kTileRows) * width * 2);
    scratch.probs.resize(size_t(kTileRows) * width * 2);
    scratch.keys.resize(size_t(num_quads) * 8 + 16);
    scratch.values.resize(size_t(num_quads) * 8 + 16);
  }
  for (int group = 0; group < num_groups; ++group) {
    const int token = begin + group * kGroup;
    const Slot slot{block_table[token / shape.block_size], token % shape.block_size};
    scratch.keys[group] = cache.key_group(slot, head);
    scratch.values[group] = cache.value_group(slot, head);
  }
  // Padding: these groups are read and masked, or only prefetched.
  for (int group = num_groups; group < (num_quads + 2) * 4; ++group) {
    scratch.keys[group] = scratch.keys[0];
    scratch.values[group] = scratch.values[0];
  }
  const int units = shape.head_dim / Unit<T>::kSize;
  for (int quad = 0; quad < num_quads; ++quad) {
    score_tile<T, kRows>(rows, &scratch.keys[quad * 4], &scratch.keys[quad * 4 + 8], &scratch.values[quad * 4],
                         units, scale, &scratch.scores[quad * kPanel], width);
  }
  float factors[kRows];
  for (int row = 0; row < kRows; ++row) {
    const Span visible{spans[row].first - begin, spans[row].stop - begin};
    factors[row] = 1.0f / softmax_row(&scratch.scores[row * width], width, visible, &scratch.probs[row * width]);
  }
  for (int dim = 0; dim < shape.head_dim; dim += kPanel) {
    value_tile<T, kRows>(scratch.probs.data(), width, scratch.values.data(), num_groups, shape.value_dim, dim,
                         [&](int row, __m512 low, __m512 high) {
                           alignas(64) T sums[kPanel];
                           const __m512 factor = _mm512_set1_ps(factors[row]);
                           store16(sums, _mm512_mul_ps(low, factor));
                           store16(sums + kLanes, _mm512_mul_ps(high, factor));
                           const int count = std::min(kPanel, shape.head_dim - dim);
                           std::memcpy(output + places[row] + dim, sums, count * sizeof(T));
                         });
  }
}

// Packs the keys and values of a chunk of tokens. The padding after `stop` repeats the first tokens.
template <class T>
Chunk pack_chunk(const Cache<T>& cache, const int* block_table, int head, int first_token, int stop, int units,
                 Scratch<T>& scratch) {
  constexpr int size = Unit<T>::kSize, in_group = kGroup / size;
  const Shape& shape = cache.shape;
  const int width = std::min(padded(stop - first_token, kPanel), kChunkTokens);
  const size_t stride = size_t(kChunkTokens / size) * kPanel;
  scratch.packed_keys.resize(size_t(kChunkTokens) * units);
  scratch.packed_values.resize(stride * (shape.value_dim / kPanel));
  for (int group = 0; group < width / kGroup; ++group) {
    const int token = first_token + group * kGroup;
    const int from = token < stop ? token : first_token;
    const Slot slot{block_table[from / shape.block_size], from % shape.block_size};
    const uint32_t *keys = cache.key_group(slot, head), *values = cache.value_group(slot, head);
    uint32_t* to = &scratch.packed_keys[size_t(group / 4 * kPanel) * units + group % 4 * kGroup];
    const int key_units = shape.head_dim / size;
    for (int unit = 0; unit < key_units; ++unit) std::memcpy(to + unit * kPanel, keys + unit * kGroup, kGroup * sizeof(uint32_t));
    for (int unit = key_units; unit < units; ++unit) std::memset(to + unit * kPanel, 0, kGroup * sizeof(uint32_t));
    for (int dim = 0; dim < shape.value_dim; dim += kPanel) {
      to = &scratch.packed_values[dim / kPanel * stride + size_t(group) * in_group * kPanel];
      for (int unit = 0; unit < in_group; ++unit) {
        std::memcpy(to + unit * kPanel, values + size_t(unit) * shape.value_dim + dim, kPanel * sizeof(uint32_t));
      }
    }
  }
  return {scratch.packed_keys.data(), scratch.packed_values.data(), stride, first_token, width};
}

// Computes the attention of up to kTileAttentionRows query rows by tiles.
template <class T>
void attend_by_tiles(const Tiles& tiles, const Cache<T>& cache, const T* queries, T* output, const int* block_table,
                     const QueryRows& rows, int num_rows, float scale, Scratch<T>& scratch) {
  const Shape& shape = cache.shape;
  TileAttention<T>& attention = scratch.tiles;
  attention.begin(num_rows, shape.head_dim);
  for (int row = 0; row < num_rows; ++row) std::copy_n(queries + rows.place(shape, row), shape.head_dim, attention.query(row));
  const int stop = rows.span(shape, num_rows - 1).stop;
  for (int token = rows.span(shape, 0).first / kGroup * kGroup; token < stop; token += kChunkTokens) {
    const Chunk chunk = pack_chunk(cache, block_table, rows.head, token, stop, attention.units(), scratch);
    attention.add(tiles, chunk, scale, [&](int row) { return rows.span(shape, row); });
  }
  for (int row = 0; row < num_rows; ++row) attention.take(row, output + rows.place(shape, row));
}

template <class T, int kRows = kTileRows, class... Args>
inline void attend_rows(int num_rows, const Cache<T>& cache, Args&&... args) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return attend_rows<T, kRows - 1>(num_rows, cache, args...);
  }
  attend_tile<T, kRows>(cache, args...);
}

// Computes the attention of an item's query rows. Tiles are used from `min_tile_rows` rows on, if the thread has
// tiles.
template <class T>
void attend_item_rows(const Tiles& tiles, const Cache<T>& cache, const T* queries, T* output, const int* block_table,
                      const QueryRows& rows, int num_rows, int min_tile_rows, float scale, Scratch<T>& scratch) {
  if (Unit<T>::kSize == 2 && tiles.ready() && num_rows >= min_tile_rows) {
    attend_by_tiles(tiles, cache, queries, output, block_table, rows, num_rows, scale, scratch);
    return;
  }
  const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int row = num_rows * tile / num_tiles, stop = num_rows * (tile + 1) / num_tiles;
    attend_rows<T>(stop - row, cache, queries, output, block_table, rows.from(row), scale, scratch);
  }
}

}  // namespace pagemill
