// y = x W^T for weights that are packed once.
//
// Packed weights are panels of 32 outputs: for every unit along the inputs, 32 units, one per output.
// A thread thus reads its share of the weights sequentially, with two vector loads per unit, and holds
// sums of up to 12 rows x 32 outputs in registers.
#pragma once

#include <algorithm>

#include "threads.h"
#include "tiles.h"
#include "units.h"

namespace pagemill {

constexpr int kPanel = 32;
// 12 x 2 sums, 2 weights and 1 input take 27 of the 32 vector registers.
constexpr int kTileRows = 12;
// Minimum number of rows for which prefetching pays, because the computation of a tile then takes long enough.
// The distance is 4 KiB, because the processor's own prefetcher stops at the end of each page.
constexpr int kMinAheadRows = 8;
constexpr int kAheadUnits = 32;
// Buffers of activations are padded to whole tiles of the matrix extension.
constexpr int kRowPadding = 32;

struct Linear {
  const uint32_t* panels;  // [num_panels][units][kPanel]
  int units;               // along the inputs
  int num_panels;
  int num_outputs;
  int min_tile_rows;  // with fewer rows, vector instructions are faster than tiles
};

// Packs `source` [num_outputs, num_inputs] as the outputs from `first_output` on of a packed matrix.
// Memory that is not packed must be zero. With a `stride` of 16 it fills one half of each panel, and the
// other half holds a matrix whose outputs are needed together with these.
template <class T>
void pack(const T* source, int num_outputs, int num_inputs, int first_output, int stride, uint32_t* panels) {
  constexpr int size = Unit<T>::kSize;
  const int units = num_inputs / size;
  for (int output = 0; output < num_outputs; ++output) {
    const int place = first_output + (output / stride) * kPanel + output % stride;
    uint32_t* to = panels + size_t(place / kPanel) * units * kPanel + place % kPanel;
    const T* from = source + size_t(output) * num_inputs;
    for (int unit = 0; unit < units; ++unit) {
      std::memcpy(to + size_t(unit) * kPanel, from + unit * size, sizeof(uint32_t));
    }
  }
}

// Multiplies rows [0, kRows) with one panel. `take(row, low, high)` receives the sums of 2 x 16 outputs.
// `ahead` is the panel to prefetch meanwhile, or null.
template <class T, int kRows, class Take>
inline __attribute__((always_inline)) void multiply_tile(
    const uint32_t* rows, size_t row_units, const uint32_t* panel, int units, const uint32_t* ahead, Take&& take) {
  __m512 low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int unit = 0; unit < units; ++unit) {
    const auto weights_low = Unit<T>::load(panel + size_t(unit) * kPanel);
    const auto weights_high = Unit<T>::load(panel + size_t(unit) * kPanel + kLanes);
    if (ahead != nullptr) {
      _mm_prefetch(ahead + size_t(unit) * kPanel, _MM_HINT_T1);
      _mm_prefetch(ahead + size_t(unit) * kPanel + kLanes, _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const auto inputs = Unit<T>::repeat(rows[row * row_units + unit]);
      low[row] = Unit<T>::dot(low[row], inputs, weights_low);
      high[row] = Unit<T>::dot(high[row], inputs, weights_high);
    }
  }
  for (int row = 0; row < kRows; ++row) take(row, low[row], high[row]);
}

template <class T, int kRows = kTileRows, class Take>
inline void multiply_rows(int num_rows, const uint32_t* rows, size_t row_units, const uint32_t* panel, int units,
                          const uint32_t* ahead, Take&& take) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_rows<T, kRows - 1>(num_rows, rows, row_units, panel, units, ahead, take);
  }
  multiply_tile<T, kRows>(rows, row_units, panel, units, ahead, take);
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

// Multiplies all rows with one panel. Tiles have similar sizes: 12 + 12 + 8 is slower than 11 + 11 + 10.
template <class T, class Take>
void multiply_panel(const Tiles& tiles, const T* x, int num_rows, const Linear& linear, int panel, bool more,
                    Take&& take) {
  const auto* rows = reinterpret_cast<const uint32_t*>(x);
  const size_t row_units = linear.units;
  const uint32_t* weights = linear.panels + size_t(panel) * linear.units * kPanel;
  if (Unit<T>::kSize == 2 && tiles.ready() && num_rows >= linear.min_tile_rows && linear.units % kTileSide == 0) {
    return multiply_panel_by_tiles(tiles, rows, num_rows, linear, weights, take);
  }
  const uint32_t* next = more ? weights + size_t(linear.units) * kPanel : nullptr;
  const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int first = int(int64_t(num_rows) * tile / num_tiles);
    const int count = int(int64_t(num_rows) * (tile + 1) / num_tiles) - first;
    // The first tile loads the panel from memory; the last tile prefetches the next panel. The only tile
    // prefetches what it reads soon.
    const uint32_t* ahead = tile == num_tiles - 1 ? next : nullptr;
    if (num_tiles == 1) ahead = num_rows >= kMinAheadRows ? weights + kAheadUnits * kPanel : nullptr;
    multiply_rows<T>(count, rows + first * row_units, row_units, weights, linear.units, ahead,
                     [&](int row, __m512 low, __m512 high) { take(first + row, low, high); });
  }
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
