// y = x W^T for weights that are packed once.
//
// Packed weights are panels of 32 outputs: for every unit along the inputs, 32 units, one per output.
// A thread thus reads its share of the weights sequentially, with two vector loads per unit, and holds
// sums of up to 12 rows x 32 outputs in registers.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "threads.h"
#include "tiles.h"

namespace pagemill {

// 12 x 2 sums, 2 weights and 1 input take 27 of the 32 vector registers.
constexpr int kTileRows = 12;
// Minimum number of rows for which prefetching pays, because the computation of a tile then takes long enough.
// The distance is 4 KiB, because the processor's own prefetcher stops at the end of each page.
constexpr int kMinAheadRows = 8;
constexpr int kAheadUnits = 32;
// Buffers of activations are padded to whole tiles of the matrix extension.
constexpr int kRowPadding = 32;

struct Linear {
  Matrix weights;
  int units;  // along the inputs
  int num_panels;
  int num_outputs;
  int min_tile_rows;  // with fewer rows, vector instructions are faster than tiles
};

// Packs `source` [num_outputs, num_units] as the outputs from `first_output` on of a packed matrix. Memory that is not
// packed must be zero. With a `stride` of 16 it fills one half of each panel, and the other half holds a matrix whose
// outputs are needed together with these.
template <class Item>
void pack(const Item* source, int num_outputs, int num_units, int first_output, int stride, Item* panels) {
  for (int output = 0; output < num_outputs; ++output) {
    const int place = first_output + (output / stride) * kPanel + output % stride;
    Item* to = panels + size_t(place / kPanel) * num_units * kPanel + place % kPanel;
    const Item* from = source + size_t(output) * num_units;
    for (int unit = 0; unit < num_units; ++unit) to[size_t(unit) * kPanel] = from[unit];
  }
}

// Multiplies rows [0, kRows) with one panel. `take(row, low, high)` receives the sums of 2 x 16 outputs.
// `ahead` is the panel to prefetch meanwhile, or null.
template <class T, int kRows, class Panel, class Take>
inline __attribute__((always_inline)) void multiply_tile(
    const uint32_t* rows, size_t row_units, const Panel& panel, int units, const Panel* ahead, Take&& take) {
  __m512 low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int unit = 0; unit < units; ++unit) {
    const auto weights_low = panel.load(unit, 0);
    const auto weights_high = panel.load(unit, kLanes);
    if (ahead != nullptr) ahead->prefetch(unit);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const auto inputs = Unit<T>::repeat(rows[row * row_units + unit]);
      low[row] = Unit<T>::dot(low[row], inputs, weights_low);
      high[row] = Unit<T>::dot(high[row], inputs, weights_high);
    }
  }
  for (int row = 0; row < kRows; ++row) take(row, low[row], high[row]);
}

template <class T, int kRows = kTileRows, class Panel, class Take>
inline void multiply_rows(int num_rows, const uint32_t* rows, size_t row_units, const Panel& panel, int units,
                          const Panel* ahead, Take&& take) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_rows<T, kRows - 1>(num_rows, rows, row_units, panel, units, ahead, take);
  }
  multiply_tile<T, kRows>(rows, row_units, panel, units, ahead, take);
}

// Calls `work(first, count)` for tiles of rows. They have similar sizes: 12 + 12 + 8 is slower than 11 + 11 + 10.
template <class Work>
void in_tiles(int num_rows, Work&& work) {
  const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int first = int(int64_t(num_rows) * tile / num_tiles);
    work(first, int(int64_t(num_rows) * (tile + 1) / num_tiles) - first);
  }
}

// Bytes of rows that stay in the L2 cache while all panels are multiplied with them.
constexpr int kBlockBytes = 384 * 1024;
// Minimum number of rows of a block. Reading a panel again pays for these rows, even if they are long.
constexpr int kMinBlockRows = 128;
// Units of a panel that stay in the L1 cache while all rows of a block are multiplied with them.
constexpr int kSplitUnits = 128;
constexpr int kMaxSplitRows = kBlockBytes / int(2 * kSplitUnits * sizeof(uint32_t));

// Multiplies all rows with one panel on the matrix extension, 32 rows at a time. The last 16 rows overlap
// the rows before them, so no memory after the rows is read. Fewer than 16 rows need the memory of 16.
template <class Take>
void multiply_panel_by_tiles(const Tiles& tiles, const uint32_t* rows, int num_rows, const Linear& linear,
                             const uint32_t* weights, Take&& take) {
  constexpr int kPair = 2 * kTileSide;
  alignas(64) float sums[kMaxSplitRows][kPanel];
  const bool split = num_rows > kPair && linear.units > 2 * kSplitUnits;
  const int at_once = split ? kMaxSplitRows : kPair, part = split ? kSplitUnits : linear.units;
  const int last = std::max(num_rows - kTileSide, 0);
  for (int begin = 0; begin < num_rows; begin += at_once) {
    const int end = std::min(begin + at_once, num_rows);
    for (int unit = 0; unit < linear.units; unit += part) {
      const auto at = [&](int row) { return rows + size_t(std::min(row, last)) * linear.units + unit; };
      const int units = std::min(part, linear.units - unit);
      for (int row = begin; row < end; row += kPair) {
        const TileRows inputs{at(row), row + kTileSide < num_rows ? at(row + kTileSide) : nullptr, linear.units};
        const TileSums to{sums[row - begin], kPanel};
        const uint32_t* panel = weights + size_t(unit) * kPanel;
        // The first rows load the panel from memory.
        if (row == 0 && unit == 0) {
          tiles.multiply<true>(inputs, panel, units, to);
        } else if (row == 0) {
          tiles.multiply_add<true>(inputs, panel, units, to);
        } else if (unit == 0) {
          tiles.multiply<false>(inputs, panel, units, to);
        } else {
          tiles.multiply_add<false>(inputs, panel, units, to);
        }
      }
    }
    for (int row = begin; row < end; ++row) {
      const int first = row / kTileSide * kTileSide;
      const float* sum = sums[row - std::min(first, last) + first - begin];
      take(row, load16(sum), load16(sum + kLanes));
    }
  }
}

// Rows [begin, end) of inputs, and the number of all rows.
struct InputRows {
  const uint32_t* units;  // of row 0
  int row_units, num_rows, begin, end;

  const uint32_t* at(int row, int unit) const { return units + size_t(row) * row_units + unit; }
};

// Multiplies rows with a part of a panel, from `first` on, on the matrix extension. Like `multiply_panel_by_tiles`, it
// reads no memory after the last row.
inline void multiply_part_by_tiles(const Tiles& tiles, const InputRows& rows, int first, const uint32_t* part, int units,
                                   const ScaledSums& to) {
  constexpr int kPair = 2 * kTileSide;
  alignas(64) float sums[kPair][kPanel];
  const int last = std::max(rows.num_rows - kTileSide, 0);
  for (int row = rows.begin; row < rows.end; row += kPair) {
    const int starts[] = {std::min(row, last), std::min(row + kTileSide, last)};
    const bool is_pair = row + kTileSide < rows.end;
    const TileRows inputs{rows.at(starts[0], first), is_pair ? rows.at(starts[1], first) : nullptr, rows.row_units};
    tiles.multiply<false>(inputs, part, units, {sums[0], kPanel});
    for (int i = row; i < std::min(row + kPair, rows.end); ++i) {
      const int half = (i - row) / kTileSide;
      const float* sum = sums[half * kTileSide + i - starts[half]];
      to.add(i - rows.begin, load16(sum), load16(sum + kLanes));
    }
  }
}

template <class T>
void multiply_part(const InputRows& rows, int first, const uint32_t* part, int units, const ScaledSums& to) {
  const FullPanel<T> panel{part}, *ahead = nullptr;
  in_tiles(rows.end - rows.begin, [&](int tile, int count) {
    multiply_rows<T>(count, rows.at(rows.begin + tile, first), rows.row_units, panel, units, ahead,
                     [&](int row, __m512 low, __m512 high) { to.add(tile + row, low, high); });
  });
}

// Multiplies rows with one panel of numbers. Few rows convert the numbers in registers. For more rows, parts of the
// panel are converted into the L1 cache.
template <class T, class Number>
void multiply_numbers(const Tiles& tiles, bool by_tiles, const InputRows& rows, const Linear& linear, int panel,
                      float (*sums)[kPanel]) {
  const int count = rows.end - rows.begin, group_units = linear.weights.group_size / Unit<T>::kSize;
  alignas(64) uint32_t part[kSplitUnits * kPanel];
  for (int start = 0; start < rows.row_units; start += group_units) {
    const NumberPanel<T, Number> numbers(linear.weights, rows.row_units * Unit<T>::kSize, panel, start / group_units);
    const int size = std::min(group_units, rows.row_units - start);
    if (!by_tiles && count <= kTileRows) {
      const ScaledSums to{sums, numbers.scales, start == 0};
      const auto* ahead = count >= kMinAheadRows ? &numbers : nullptr;
      multiply_rows<T>(count, rows.at(rows.begin, start), rows.row_units, numbers, size, ahead,
                       [&](int row, __m512 low, __m512 high) { to.add(row, low, high); });
      continue;
    }
    for (int first = 0; first < size; first += kSplitUnits) {
      const int units = std::min(kSplitUnits, size - first);
      for (int unit = 0; unit < units; ++unit) {
        for (int lane = 0; lane < kPanel; lane += kLanes) {
          _mm512_store_si512(part + unit * kPanel + lane, numbers.load_full(first + unit, lane));
        }
        numbers.prefetch(first + unit);
      }
      const ScaledSums to{sums, numbers.scales, start + first == 0};
      if (by_tiles) {
        multiply_part_by_tiles(tiles, rows, start + first, part, units, to);
      } else {
        multiply_part<T>(rows, start + first, part, units, to);
      }
    }
  }
}

template <class T>
void multiply_format(const Tiles& tiles, bool by_tiles, const InputRows& rows, const Linear& linear, int panel,
                     float (*sums)[kPanel]) {
  const auto run = [&]<class Number>() { multiply_numbers<T, Number>(tiles, by_tiles, rows, linear, panel, sums); };
  switch (Format(linear.weights.format)) {
    case Format::kFull:
      break;
    case Format::kInt8:
      return run.template operator()<Int8>();
    case Format::kFp8:
      return run.template operator()<Fp8>();
    case Format::kInt4:
      return run.template operator()<Int4<false>>();
    case Format::kInt4Zeros:
      return run.template operator()<Int4<true>>();
  }
  __builtin_unreachable();
}

// Compiled once, in decoder.cpp.
extern template void multiply_format<float>(const Tiles&, bool, const InputRows&, const Linear&, int, float (*)[kPanel]);
extern template void multiply_format<BF16>(const Tiles&, bool, const InputRows&, const Linear&, int, float (*)[kPanel]);

// Multiplies all rows with one panel.
template <class T, class Take>
void multiply_panel(const Tiles& tiles, const T* x, int num_rows, const Linear& linear, int panel, bool more,
                    Take&& take) {
  const auto* rows = reinterpret_cast<const uint32_t*>(x);
  const bool by_tiles =
      Unit<T>::kSize == 2 && tiles.ready() && num_rows >= linear.min_tile_rows && linear.units % kTileSide == 0;
  if (Format(linear.weights.format) != Format::kFull) {
    alignas(64) float sums[kMaxSplitRows][kPanel];
    for (int begin = 0; begin < num_rows; begin += kMaxSplitRows) {
      const int end = std::min(begin + kMaxSplitRows, num_rows);
      multiply_format<T>(tiles, by_tiles, {rows, linear.units, num_rows, begin, end}, linear, panel, sums);
      for (int row = begin; row < end; ++row) take(row, load16(sums[row - begin]), load16(sums[row - begin] + kLanes));
    }
    return;
  }
  const uint32_t* weights = static_cast<const uint32_t*>(linear.weights.panels) + size_t(panel) * linear.units * kPanel;
  if (by_tiles) return multiply_panel_by_tiles(tiles, rows, num_rows, linear, weights, take);
  // The first tile loads the panel from memory; the last tile prefetches the next panel. The only tile
  // prefetches what it reads soon.
  const bool is_only = num_rows <= kTileRows;
  const FullPanel<T> next{weights + size_t(is_only ? kAheadUnits : linear.units) * kPanel};
  const bool is_fetched = is_only ? num_rows >= kMinAheadRows : more;
  in_tiles(num_rows, [&](int first, int count) {
    const auto* ahead = is_fetched && first + count == num_rows ? &next : nullptr;
    multiply_rows<T>(count, rows + size_t(first) * linear.units, linear.units, FullPanel<T>{weights}, linear.units, ahead,
                     [&](int row, __m512 low, __m512 high) { take(first + row, low, high); });
  });
}

// Computes y = x W^T as one phase of a team or alone; `take(row, panel, low, high)` receives the sums.
template <class T, class Worker, class Take>
void multiply(Worker& member, const T* x, int num_rows, const Linear& linear, Take&& take) {
  const int row_bytes = linear.units * int(sizeof(uint32_t));
  const int whole_block = std::max(kBlockBytes / row_bytes / kRowPadding * kRowPadding, kMinBlockRows);
  const int num_blocks = (num_rows + whole_block - 1) / whole_block;
  const int panels_at_once = std::max(linear.num_panels / (kItemsPerMember * member.team_size()), 1);
  const int num_ranges = (linear.num_panels + panels_at_once - 1) / panels_at_once;
  member.each(num_blocks * num_ranges, [&](int item) {
    const int start = item / num_ranges * whole_block, first = item % num_ranges * panels_at_once;
    const int count = std::min(whole_block, num_rows - start);
    const int stop = std::min(first + panels_at_once, linear.num_panels);
    for (int panel = first; panel < stop; ++panel) {
      multiply_panel(member.tiles(), x + size_t(start) * linear.units * Unit<T>::kSize, count, linear, panel, panel + 1 < stop,
                     [&](int row, __m512 low, __m512 high) { take(start + row, panel, low, high); });
    }
  });
}

}  // namespace pagemill
