// Attention within segments: in every head, each row sees all rows of its segment and no others.
//
// Keys and values are packed like weights (see linear.h): tokens are the outputs of a segment's keys and
// the inputs of its values. Scores and sums over values are thus products of 12 rows with a panel.
#pragma once

#include <memory>

#include "attention.h"

namespace pagemill {

struct Segments {
  const void *queries, *keys, *values;  // rows of [num_heads, head_dim]
  const float *cos, *sin;               // rows of [head_dim], of two equal halves; null for no rotation
  const int32_t* cu_seqlens;            // [num_segments + 1]
  void* output;                         // [num_rows, num_heads, head_dim]
  int32_t num_segments, num_heads, head_dim;
  int32_t row_stride, angle_stride;  // from one row to the next, in elements
  int32_t min_tile_rows;             // a segment with fewer rows is computed by vectors
  float scale;
};

// The phases are packing and attention.
constexpr int kSegmentPhases = 2;

template <class T>
class SegmentAttention {
 public:
  SegmentAttention(const Segments& segments, int team_size)
      : segments_(segments),
        key_units_(segments.head_dim / Unit<T>::kSize),
        units_(padded(key_units_, kTileSide)),
        value_dim_(padded(segments.head_dim, kPanel)),
        scratch_(team_size) {
    int longest = 0;
    for (int i = 0; i < segments.num_segments; ++i) {
      const int first_row = segments.cu_seqlens[i], length = segments.cu_seqlens[i + 1] - first_row;
      const Segment segment{first_row, length, int(groups_.size()), padded(length, kPanel) / kPanel};
      for (int token = 0; token < length; token += kPanel) groups_.push_back({segment, token});
      for (int head = 0; head < segments.num_heads; ++head) {
        const int size = length < segments.min_tile_rows ? kItemRows : kTileAttentionRows;
        for (int row = 0; row < length; row += size) {
          items_.push_back({segment, head, row, std::min(size, length - row)});
        }
      }
      longest = std::max(longest, segment.width());
    }
    const size_t num_tokens = groups_.size() * kPanel;
    keys_ = std::make_unique_for_overwrite<uint32_t[]>(num_tokens * segments.num_heads * units_);
    values_ = std::make_unique_for_overwrite<uint32_t[]>(num_tokens * segments.num_heads * value_dim_ / Unit<T>::kSize);
    for (auto& scratch : scratch_) {
      scratch.queries.resize(size_t(kTileRows) * segments.head_dim);
      scratch.scores.resize(size_t(kTileRows) * longest);
      scratch.probs.resize(size_t(kTileRows) * longest);
    }
  }

  void run(Member member) {
    member.ranges(int(groups_.size()), [&](int first, int stop) {
      for (int group = first; group < stop; ++group) pack_group(groups_[group]);
    });
    member.each(int(items_.size()), [&](int index) {
      const Item& item = items_[index];
      if (member.tiles().ready() && item.segment.length >= segments_.min_tile_rows) {
        return attend_by_tiles(member.tiles(), item, scratch_[member.index()].tiles);
      }
      const int num_tiles = (item.num_rows + kTileRows - 1) / kTileRows;
      for (int tile = 0; tile < num_tiles; ++tile) {
        const int row = item.num_rows * tile / num_tiles, stop = item.num_rows * (tile + 1) / num_tiles;
        attend(item.segment, item.head, item.first_row + row, stop - row, scratch_[member.index()]);
      }
    });
  }

 private:
  // Rows per item: enough to outweigh the cost of claiming it.
  static constexpr int kItemRows = 8 * kTileRows;
  // The panel to prefetch.
  static constexpr const FullPanel<T>* kNothing = nullptr;
  // Units of 32 tokens in one dimension.
  static constexpr int kPanelUnits = kPanel / Unit<T>::kSize;

  struct Segment {
    int first_row, length, first_group, num_groups;
    int width() const { return num_groups * kPanel; }
  };
  struct Group {  // 32 tokens, or the rest of a segment
    Segment segment;
    int first_token;
  };
  struct Item {
    Segment segment;
    int head, first_row, num_rows;
  };
  struct Rows {
    std::vector<T> queries, probs;
    std::vector<float> scores;
    TileAttention<T> tiles;
  };

  // [num_groups][units][32 tokens]
  uint32_t* keys(const Segment& segment, int head) const {
    return &keys_[(size_t(head) * groups_.size() + segment.first_group) * units_ * kPanel];
  }
  // [value_dim / 32][num_groups * kPanelUnits][32 dimensions]
  uint32_t* values(const Segment& segment, int head) const {
    return &values_[(size_t(head) * groups_.size() + segment.first_group) * kPanelUnits * value_dim_];
  }
  const T* numbers(const void* rows, int row, int head) const {
    return static_cast<const T*>(rows) + size_t(row) * segments_.row_stride + head * segments_.head_dim;
  }

  // Copies and rotates one head of a row of queries or keys.
  void turn(const void* rows, int row, int head, T* to) const {
    const T* from = numbers(rows, row, head);
    const int head_dim = segments_.head_dim;
    if (segments_.cos == nullptr) {
      std::copy_n(from, head_dim, to);
      return;
    }
    alignas(64) float turned[kMaxHeadDim];
    for (int dim = 0; dim < head_dim; ++dim) turned[dim] = to_float(from[dim]);
    const size_t angles = size_t(row) * segments_.angle_stride;
    rotate(turned, segments_.cos + angles, segments_.sin + angles, head_dim);
    convert(turned, head_dim, to);
  }

  void pack_group(const Group& group) {
    constexpr int size = Unit<T>::kSize;
    const Segment& segment = group.segment;
    alignas(64) T key[kMaxHeadDim], value[kMaxHeadDim];
    for (int head = 0; head < segments_.num_heads; ++head) {
      uint32_t* panel = keys(segment, head) + size_t(group.first_token) * units_;
      uint32_t* to = values(segment, head);
      for (int token = group.first_token; token < group.first_token + kPanel; ++token) {
        // Padding tokens get masked scores, but 0 times their values is added, so these must be finite.
        std::fill_n(value, value_dim_, T{});
        if (token < segment.length) {
          turn(segments_.keys, segment.first_row + token, head, key);
          std::copy_n(numbers(segments_.values, segment.first_row + token, head), segments_.head_dim, value);
          for (int unit = 0; unit < key_units_; ++unit) {
            std::memcpy(panel + unit * kPanel + token % kPanel, key + unit * size, sizeof(uint32_t));
          }
          for (int unit = key_units_; unit < units_; ++unit) panel[unit * kPanel + token % kPanel] = 0;
        }
        for (int dim = 0; dim < value_dim_; dim += kLanes) {
          const size_t place = (size_t(dim / kPanel) * segment.num_groups * kPanelUnits + token / size) * kPanel;
          Unit<T>::place(to + place + dim % kPanel, value + dim, token % size);
        }
      }
    }
  }

  void attend(const Segment& segment, int head, int first_row, int num_rows, Rows& scratch) {
    const int width = segment.width(), row_units = width / Unit<T>::kSize;
    for (int row = 0; row < num_rows; ++row) {
      turn(segments_.queries, segment.first_row + first_row + row, head, &scratch.queries[row * segments_.head_dim]);
    }
    const auto* queries = reinterpret_cast<const uint32_t*>(scratch.queries.data());
    const __m512 scale = _mm512_set1_ps(segments_.scale);
    for (int group = 0; group < segment.num_groups; ++group) {
      const FullPanel<T> panel{keys(segment, head) + size_t(group) * kPanel * units_};
      float* to = &scratch.scores[group * kPanel];
      multiply_rows<T>(num_rows, queries, key_units_, panel, key_units_, kNothing, [&](int row, __m512 low, __m512 high) {
        store16(to + size_t(row) * width, _mm512_mul_ps(low, scale));
        store16(to + size_t(row) * width + kLanes, _mm512_mul_ps(high, scale));
      });
    }
    float factors[kTileRows];
    for (int row = 0; row < num_rows; ++row) {
      const size_t first = size_t(row) * width;
      factors[row] = 1.0f / softmax_row(&scratch.scores[first], width, {0, segment.length}, &scratch.probs[first]);
    }
    const auto* probs = reinterpret_cast<const uint32_t*>(scratch.probs.data());
    const size_t token_size = size_t(segments_.num_heads) * segments_.head_dim;
    T* output = static_cast<T*>(segments_.output) + (segment.first_row + first_row) * token_size + head * segments_.head_dim;
    for (int dim = 0; dim < segments_.head_dim; dim += kPanel) {
      const FullPanel<T> panel{values(segment, head) + size_t(dim) * row_units};
      multiply_rows<T>(num_rows, probs, row_units, panel, row_units, kNothing, [&](int row, __m512 low, __m512 high) {
        const __m512 factor = _mm512_set1_ps(factors[row]);
        T* to = output + row * token_size + dim;
        store32(to, segments_.head_dim - dim, _mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor));
      });
    }
  }

  void attend_by_tiles(const Tiles& tiles, const Item& item, TileAttention<T>& attention) const {
    constexpr int size = Unit<T>::kSize;
    const Segment& segment = item.segment;
    attention.begin(item.num_rows, segments_.head_dim);
    for (int row = 0; row < item.num_rows; ++row) {
      turn(segments_.queries, segment.first_row + item.first_row + row, item.head, attention.query(row));
    }
    for (int token = 0; token < segment.width(); token += kChunkTokens) {
      const Chunk chunk{keys(segment, item.head) + size_t(token) * units_,
                        values(segment, item.head) + size_t(token / size) * kPanel,
                        size_t(segment.width() / size) * kPanel, token, std::min(kChunkTokens, segment.width() - token)};
      attention.add(tiles, chunk, segments_.scale, [&](int) { return Span{0, segment.length}; });
    }
    const size_t token_size = size_t(segments_.num_heads) * segments_.head_dim;
    T* output = static_cast<T*>(segments_.output) + size_t(segment.first_row + item.first_row) * token_size +
                item.head * segments_.head_dim;
    for (int row = 0; row < item.num_rows; ++row) attention.take(row, output + row * token_size);
  }

  const Segments segments_;
  const int key_units_;  // per head
  const int units_;      // per head, rounded up to whole tiles; units from key_units_ on are 0
  const int value_dim_;  // head_dim, rounded up to whole panels
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::vector<Rows> scratch_;
  std::unique_ptr<uint32_t[]> keys_, values_;
};

}  // namespace pagemill
