// C functions of the decoder, as called by workers/engine/cpu/decoder.py.
#include "decoder.h"

#include <sys/mman.h>

namespace pagemill {

template void multiply_format<float>(const Tiles&, bool, const InputRows&, const Linear&, int, float (*)[kPanel]);
template void multiply_format<BF16>(const Tiles&, bool, const InputRows&, const Linear&, int, float (*)[kPanel]);

}  // namespace pagemill

using pagemill::BF16;

extern "C" {

// Whether products in bfloat16 can run on tiles.
int pagemill_has_tiles() { return pagemill::Tiles().ready(); }

// Allocates zeroed memory, in huge pages where available because a step reads all of the weights.
void* pagemill_allocate(size_t num_bytes) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, num_bytes, MADV_HUGEPAGE);
  return memory;
}

void pagemill_free(void* memory, size_t num_bytes) { munmap(memory, num_bytes); }

// Packs units of one byte or four bytes, as linear.h describes.
void pagemill_pack(int unit_bytes, const void* source, int num_outputs, int num_units, int first_output, int stride,
                   void* panels) {
  const auto pack = [&]<class Item>(const Item* from) {
    pagemill::pack(from, num_outputs, num_units, first_output, stride, static_cast<Item*>(panels));
  };
  if (unit_bytes == 1) return pack(static_cast<const uint8_t*>(source));
  pack(static_cast<const uint32_t*>(source));
}

// Creates a decoder. Memory that the structs point to must outlive it.
void* pagemill_decoder(const pagemill::Config* config, const pagemill::LayerWeights* layers, const float* final_norm,
                       const pagemill::Matrix* head, int num_threads) {
  if (config->is_bf16) return new pagemill::Decoder<BF16>(*config, layers, final_norm, *head, num_threads);
  return new pagemill::Decoder<float>(*config, layers, final_norm, *head, num_threads);
}

void pagemill_forward(void* decoder, const pagemill::Step* step) {
  static_cast<pagemill::DecoderBase*>(decoder)->forward(*step);
}

void pagemill_delete(void* decoder) { delete static_cast<pagemill::DecoderBase*>(decoder); }
}
