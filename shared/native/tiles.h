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

#if PAGEMILL_TILES

// Requests permission from Linux, once per process; see its Documentation/arch/x86/xstate.rst.
inline bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Makes the compiler write all memory, that at the address included, before what follows. GCC's tile
// instructions do not tell it what they read, so it drops or delays writes that only they need.
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

  // Computes the sums of 16 rows from `first` on, and of 16 from `second` on unless it is null, with the 32
  // outputs of a panel.
  void multiply(const uint32_t* first, const uint32_t* second, const uint32_t* panel, int units,
                float (*sums)[2][kTileSide]) const {
    constexpr int kPanelBytes = 2 * kTileSide * sizeof(uint32_t), kSumBytes = 2 * kTileSide * sizeof(float);
    // Prefetch distance: far enough for the memory latency, near enough to stay in the L1 cache.
    constexpr int kAhead = 2 * kTileSide * 2 * kTileSide;
    const int row_bytes = int(units * sizeof(uint32_t));
    finish_writes(first);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int unit = 0; unit < units; unit += kTileSide) {
      const uint32_t* weights = panel + size_t(unit) * 2 * kTileSide;
      for (int line = 0; line < 2 * kTileSide; ++line) _mm_prefetch(weights + kAhead + line * kTileSide, _MM_HINT_T0);
      _tile_loadd(4, first + unit, row_bytes);
      _tile_loadd(6, weights, kPanelBytes);
      _tile_loadd(7, weights + kTileSide, kPanelBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second != nullptr) {
        _tile_loadd(5, second + unit, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0][0], kSumBytes);
    _tile_stored(1, sums[0][1], kSumBytes);
    _tile_stored(2, sums[kTileSide][0], kSumBytes);
    _tile_stored(3, sums[kTileSide][1], kSumBytes);
  }

 private:
  const bool ready_ = request_tiles();
};

#else

class Tiles {
 public:
  Tiles() {}
  bool ready() const { return false; }
  void multiply(const uint32_t*, const uint32_t*, const uint32_t*, int, float (*)[2][kTileSide]) const {}
};

#endif

}  // namespace pagemill
