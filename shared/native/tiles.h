// Intel's matrix extension (AMX): 16 x 16 sums over 32 bfloat16 products at a time.
//
// Panels have the layout of its tiles: rows of 16 units.
#pragma once

#include "units.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define PAGEMILL_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PAGEMILL_TILES 0
#endif

namespace pagemill {

constexpr int kTileSide = 16;

// 16 rows of units, and 16 more unless `second` is null; `stride` is the number of units from one to the next.
struct TileRows {
  const uint32_t *first, *second;
  ptrdiff_t stride;
};

// The 32 sums of each row; `stride` is the number of floats from one row to the next.
struct TileSums {
  float* first;
  ptrdiff_t stride;
};

#if PAGEMILL_TILES

// Requests permission from Linux, once per process; see its Documentation/arch/x86/xstate.rst.
inline bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Makes the compiler complete all writes to memory, including the memory at `address`, before the next statement.
// GCC does not know what its tile instructions read, so it drops or delays writes that only they need.
inline void finish_writes(const void* address) { asm volatile("" ::"r"(address) : "memory"); }

// The tile registers of the current thread: all eight have 16 rows of 64 bytes while this is in scope.
// Every tile instruction is in a method, so none can run without the configuration.
class Tiles {
 public:
  Tiles() {
    if (!ready_) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = kTileSide;
    }
    finish_writes(&config);
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    if (ready_) _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Whether this thread has tiles. Without them, `multiply` must not be called.
  bool ready() const { return ready_; }

  // Computes the products of rows with the 32 outputs of a panel; `kAhead` says whether to prefetch the panel.
  template <bool kAhead>
  void multiply(TileRows rows, const uint32_t* panel, int units, TileSums to) const {
    finish_writes(rows.first);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    accumulate<kAhead>(rows, panel, units);
    store(rows, to);
  }

  // Adds the products of rows with the 32 outputs of a panel.
  template <bool kAhead>
  void multiply_add(TileRows rows, const uint32_t* panel, int units, TileSums to) const {
    const int row_bytes = int(to.stride * sizeof(float));
    finish_writes(rows.first);
    _tile_loadd(0, to.first, row_bytes);
    _tile_loadd(1, to.first + kTileSide, row_bytes);
    if (rows.second != nullptr) {
      _tile_loadd(2, to.first + kTileSide * to.stride, row_bytes);
      _tile_loadd(3, to.first + kTileSide * to.stride + kTileSide, row_bytes);
    }
    accumulate<kAhead>(rows, panel, units);
    store(rows, to);
  }

 private:
  template <bool kAhead>
  void accumulate(TileRows rows, const uint32_t* panel, int units) const {
    constexpr int kPanelBytes = 2 * kTileSide * sizeof(uint32_t);
    // Prefetch distance: far enough for the memory latency, near enough to stay in the L1 cache.
    constexpr int kDistance = 2 * kTileSide * 2 * kTileSide;
    const int row_bytes = int(rows.stride * sizeof(uint32_t));
    for (int unit = 0; unit < units; unit += kTileSide) {
      const uint32_t* weights = panel + size_t(unit) * 2 * kTileSide;
      if constexpr (kAhead) {
        for (int line = 0; line < 2 * kTileSide; ++line) _mm_prefetch(weights + kDistance + line * kTileSide, _MM_HINT_T0);
      }
      _tile_loadd(4, rows.first + unit, row_bytes);
      _tile_loadd(6, weights, kPanelBytes);
      _tile_loadd(7, weights + kTileSide, kPanelBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (rows.second != nullptr) {
        _tile_loadd(5, rows.second + unit, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  void store(TileRows rows, TileSums to) const {
    const int row_bytes = int(to.stride * sizeof(float));
    _tile_stored(0, to.first, row_bytes);
    _tile_stored(1, to.first + kTileSide, row_bytes);
    if (rows.second == nullptr) return;
    _tile_stored(2, to.first + kTileSide * to.stride, row_bytes);
    _tile_stored(3, to.first + kTileSide * to.stride + kTileSide, row_bytes);
  }

  const bool ready_ = request_tiles();
};

#else

class Tiles {
 public:
  Tiles() {}
  bool ready() const { return false; }
  template <bool kAhead>
  void multiply(TileRows, const uint32_t*, int, TileSums) const {}
  template <bool kAhead>
  void multiply_add(TileRows, const uint32_t*, int, TileSums) const {}
};

#endif

}  // namespace pagemill
