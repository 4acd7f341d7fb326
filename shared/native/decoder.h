// Llama-like decoder over a flat batch: RMSNorm, rotary embedding, grouped-query attention over a paged
// KV cache, SiLU-gated MLP. One call is one step of the whole batch through all layers.
//
// All threads process the phases of a layer together. Hidden states are float32; the operands of products
// have the type of the weights. The structs are mirrored in workers/engine/cpu/decoder.py.
#pragma once

#include <memory>

#include "attention.h"

namespace pagemill {

struct LayerWeights {
  Matrix qkv, out, gate_up, down;
  const float *qkv_bias, *out_bias;  // may be null
  const float *input_norm, *post_norm;
  const float *query_norm, *key_norm;  // per head; may be null
  int32_t window;                      // 0 for none
};

struct Config {
  int32_t hidden_size, intermediate_size, num_layers, vocab_size;
  int32_t num_heads, num_kv_heads, head_dim;
  float norm_eps, scale;
  int32_t is_bf16;
  // Minimum number of rows of a product that is computed by tiles.
  int32_t qkv_tile_rows, out_tile_rows, gate_up_tile_rows, down_tile_rows, head_tile_rows;
  // Minimum number of query rows of a sequence and KV head for attention by tiles.
  int32_t attention_tile_rows;
};

struct Step {
  int32_t num_tokens, num_sequences, block_size, max_blocks, num_logits, num_hidden, num_deepstack;
  const int32_t* query_start_loc;  // [num_sequences + 1]
  const int32_t* seq_lens;         // [num_sequences]
  const int32_t* block_tables;     // [num_sequences, max_blocks]
  const int32_t* output_rows;      // [num_logits + num_hidden]
  const void* embeddings;          // [num_tokens, hidden_size]
  const float *cos, *sin;          // [num_tokens, head_dim]
  const void* deepstack;           // [num_deepstack, num_tokens, hidden_size]
  void* const* keys;               // per layer
  void* const* values;
  float* logits;  // [num_logits, vocab_size], of the first output rows
  float* hidden;  // [num_hidden, hidden_size], of the others; null if there are none
};

// Rows per item of a chunk's attention: enough to outweigh the cost of claiming it.
constexpr int kItemRows = 8 * kTileRows;
// Maximum number of rows of a block, which one member takes through a layer's products.
constexpr int kAloneRows = 256;

struct AttentionItem {
  int sequence, head, first_row, num_rows;
};

struct DecoderBase {
  virtual ~DecoderBase() = default;
  virtual void forward(const Step& step) = 0;
};

template <class T>
class Decoder : public DecoderBase {
 public:
  Decoder(const Config& config, const LayerWeights* layers, const float* final_norm, const Matrix& head, int num_threads)
      : config_(config),
        layers_(layers, layers + config.num_layers),
        final_norm_(final_norm),
        head_(linear(head, config.hidden_size, config.vocab_size, config.head_tile_rows)),
        scratch_(num_threads),
        go_([this](Member member) { run(step_, member); }),
        team_(num_threads) {}

  void forward(const Step& step) override {
    team_.settle();
    prepare(step);
    step_ = step;
    team_.run(num_phases(), go_);
  }

 private:
  static Linear linear(const Matrix& weights, int num_inputs, int num_outputs, int min_tile_rows) {
    return {weights, num_inputs / Unit<T>::kSize, padded(num_outputs, kPanel) / kPanel, num_outputs, min_tile_rows};
  }

  // Nine per layer, and five before and after the layers.
  int num_phases() const { return 9 * config_.num_layers + 5; }

  int q_size() const { return config_.num_heads * config_.head_dim; }
  int kv_size() const { return config_.num_kv_heads * config_.head_dim; }
  int qkv_width() const { return padded(q_size() + 2 * kv_size(), kPanel); }

  void prepare(const Step& step) {
    const size_t rows = padded(step.num_tokens, kRowPadding);
    grow(hidden_, rows * config_.hidden_size);
    grow(normed_, rows * config_.hidden_size);
    grow(qkv_, rows * qkv_width());
    grow(queries_, rows * q_size());
    grow(attended_, rows * q_size());
    grow(gated_, rows * config_.intermediate_size);
    const size_t output = padded(step.num_logits + step.num_hidden, kRowPadding);
    grow(output_hidden_, output * config_.hidden_size);
    grow(output_attended_, output * q_size());
    slots_.resize(step.num_tokens);
    items_.clear();
    const int heads_per_group = config_.num_heads / config_.num_kv_heads;
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
      const int start = step.query_start_loc[sequence], stop = step.query_start_loc[sequence + 1];
      const int past = step.seq_lens[sequence] - (stop - start);
      for (int row = start; row < stop; ++row) {
        const int position = past + row - start;
        slots_[row] = {table(step, sequence)[position / step.block_size], position % step.block_size};
      }
      const int num_rows = (stop - start) * heads_per_group;
      for (int head = 0; head < config_.num_kv_heads; ++head) {
        const int size = num_rows < config_.attention_tile_rows ? kItemRows : kTileAttentionRows;
        for (int row = 0; row < num_rows; row += size) {
          items_.push_back({sequence, head, row, std::min(size, num_rows - row)});
        }
      }
    }
  }

  // Buffers never shrink: growing them again would write megabytes of zeros after every decode.
  template <class Number>
  static void grow(std::vector<Number>& numbers, size_t size) {
    if (numbers.size() < size) numbers.resize(size);
  }

  const int* table(const Step& step, int sequence) const {
    return step.block_tables + size_t(sequence) * step.max_blocks;
  }

  void run(const Step& step, Member member) {
    const int hidden_size = config_.hidden_size, num_tokens = step.num_tokens;
    const auto* embeddings = static_cast<const T*>(step.embeddings);
    for_rows(member, num_tokens, [&](int row) {
      add_row(embeddings + size_t(row) * hidden_size, &hidden_[size_t(row) * hidden_size], true);
    });
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      attend(step, layer, member);
      if (layer == config_.num_layers - 1 && layer >= step.num_deepstack) break;
      mix(layer, num_tokens, attended_.data(), hidden_.data(), member);
      if (layer < step.num_deepstack) {
        const auto* level = static_cast<const T*>(step.deepstack) + size_t(layer) * num_tokens * hidden_size;
        for_rows(member, num_tokens, [&](int row) {
          add_row(level + size_t(row) * hidden_size, &hidden_[size_t(row) * hidden_size], false);
        });
      }
    }
    // After the last attention only the output rows are needed.
    const int num_output = step.num_logits + step.num_hidden;
    for_rows(member, num_output, [&](int i) {
      const size_t row = step.output_rows[i];
      std::copy_n(&hidden_[row * hidden_size], hidden_size, &output_hidden_[size_t(i) * hidden_size]);
      std::copy_n(&attended_[row * q_size()], q_size(), &output_attended_[size_t(i) * q_size()]);
    });
    if (config_.num_layers > step.num_deepstack) {
      mix(config_.num_layers - 1, num_output, output_attended_.data(), output_hidden_.data(), member);
    }
    norm_rows(final_norm_, 0, num_output, output_hidden_.data(), member);
    for_rows(member, step.num_hidden, [&](int row) {
      const T* from = &normed_[size_t(step.num_logits + row) * hidden_size];
      for (int i = 0; i < hidden_size; ++i) step.hidden[size_t(row) * hidden_size + i] = to_float(from[i]);
    });
    multiply(member, normed_.data(), step.num_logits, head_, [&](int row, int panel, __m512 low, __m512 high) {
      const int first = panel * kPanel, left = config_.vocab_size - first;
      float* to = step.logits + size_t(row) * config_.vocab_size + first;
      const uint32_t mask = left >= kPanel ? ~0u : (1u << left) - 1;
      _mm512_mask_storeu_ps(to, __mmask16(mask), low);
      _mm512_mask_storeu_ps(to + kLanes, __mmask16(mask >> kLanes), high);
    });
  }

  void attend(const Step& step, int layer, Member& member) {
    const LayerWeights& weights = layers_[layer];
    const int num_tokens = step.num_tokens, hidden_size = config_.hidden_size;
    Cache<T> cache{static_cast<T*>(step.keys[layer]), static_cast<T*>(step.values[layer]), shape(step)};
    in_blocks(member, num_tokens, [&](auto& worker, int first, int count) {
      norm_rows(weights.input_norm, first, count, hidden_.data(), worker);
      const Linear qkv = linear(weights.qkv, hidden_size, qkv_width(), config_.qkv_tile_rows);
      float* output = &qkv_[size_t(first) * qkv_width()];
      multiply(worker, &normed_[size_t(first) * hidden_size], count, qkv, [&](int row, int panel, __m512 low, __m512 high) {
        float* to = output + size_t(row) * qkv_width() + panel * kPanel;
        if (weights.qkv_bias != nullptr) {
          low = _mm512_add_ps(low, load16(weights.qkv_bias + panel * kPanel));
          high = _mm512_add_ps(high, load16(weights.qkv_bias + panel * kPanel + kLanes));
        }
        store16(to, low);
        store16(to + kLanes, high);
      });
      for_rows(worker, count, [&](int row) { place_row(step, weights, first + row, cache); });
    });
    // The last rows of a prompt see the most tokens and take longest, so they come first.
    member.each(int(items_.size()), [&](int item) {
      attend_item(member.tiles(), step, items_[items_.size() - 1 - item], weights.window, cache, scratch_[member.index()]);
    });
  }

  void attend_item(const Tiles& tiles, const Step& step, const AttentionItem& item, int window, const Cache<T>& cache,
                   Scratch<T>& scratch) {
    const int start = step.query_start_loc[item.sequence];
    const int past = step.seq_lens[item.sequence] - (step.query_start_loc[item.sequence + 1] - start);
    const size_t first = size_t(start) * q_size();
    attend_item_rows(tiles, cache, &queries_[first], &attended_[first], table(step, item.sequence),
                     {item.head, past, item.first_row, window}, item.num_rows, config_.attention_tile_rows, config_.scale,
                     scratch);
  }

  // The rest of a layer for the given rows: the output projection of attention, and the MLP.
  void mix(int layer, int num_rows, const T* attended, float* hidden, Member& member) {
    const LayerWeights& weights = layers_[layer];
    const int inner = config_.intermediate_size, hidden_size = config_.hidden_size;
    in_blocks(member, num_rows, [&](auto& worker, int first, int count) {
      float* block = hidden + size_t(first) * hidden_size;
      const Linear out = linear(weights.out, q_size(), hidden_size, config_.out_tile_rows);
      add_product(attended + size_t(first) * q_size(), count, out, weights.out_bias, block, worker);
      norm_rows(weights.post_norm, first, count, hidden, worker);
      const Linear gate_up = linear(weights.gate_up, hidden_size, 2 * inner, config_.gate_up_tile_rows);
      T* output = &gated_[size_t(first) * inner];
      multiply(worker, &normed_[size_t(first) * hidden_size], count, gate_up, [&](int row, int panel, __m512 gate, __m512 up) {
        const __m512 gated = _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid16(gate)), up);
        store16(output + size_t(row) * inner + panel * kLanes, gated);
      });
      const Linear down = linear(weights.down, inner, hidden_size, config_.down_tile_rows);
      add_product(output, count, down, nullptr, block, worker);
    });
  }

  // Runs `work(worker, first, count)` for rows [first, first + count). Few rows are one block, and the members of
  // the team share its outputs. Many rows are divided into blocks for single members, to fit into their L2 caches.
  template <class Work>
  static void in_blocks(Member& member, int num_rows, Work&& work) {
    if (num_rows < member.team_size() * kMinBlockRows) return work(member, 0, num_rows);
    const int most = member.team_size() * kAloneRows;
    const int num_blocks = (num_rows + most - 1) / most * member.team_size();
    const int rows = padded((num_rows + num_blocks - 1) / num_blocks, kRowPadding);
    member.each((num_rows + rows - 1) / rows, [&](int block) {
      Alone alone(member.tiles());
      work(alone, block * rows, std::min(rows, num_rows - block * rows));
    });
  }

  // hidden += x W^T + bias
  template <class Worker>
  void add_product(const T* x, int num_rows, const Linear& weights, const float* bias, float* hidden, Worker& member) {
    multiply(member, x, num_rows, weights, [&](int row, int panel, __m512 low, __m512 high) {
      const int first = panel * kPanel, left = config_.hidden_size - first;
      const uint32_t mask = left >= kPanel ? ~0u : (1u << left) - 1;
      const auto low_mask = __mmask16(mask), high_mask = __mmask16(mask >> kLanes);
      float* to = &hidden[size_t(row) * config_.hidden_size + first];
      if (bias != nullptr) {
        low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low_mask, bias + first));
        high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(high_mask, bias + first + kLanes));
      }
      _mm512_mask_storeu_ps(to, low_mask, _mm512_add_ps(low, _mm512_maskz_loadu_ps(low_mask, to)));
      _mm512_mask_storeu_ps(to + kLanes, high_mask, _mm512_add_ps(high, _mm512_maskz_loadu_ps(high_mask, to + kLanes)));
    });
  }

  // Normalises heads where the model does, rotates them, and writes keys and values to the cache.
  void place_row(const Step& step, const LayerWeights& weights, int row, Cache<T>& cache) {
    const int head_dim = config_.head_dim;
    float* q = &qkv_[size_t(row) * qkv_width()];
    float* k = q + q_size();
    const float* v = k + kv_size();
    const float* cos = step.cos + size_t(row) * head_dim;
    const float* sin = step.sin + size_t(row) * head_dim;
    T* to = &queries_[size_t(row) * q_size()];
    alignas(64) T key[kMaxHeadDim], value[kMaxHeadDim] = {};
    for (int head = 0; head < config_.num_heads; ++head) {
      float* from = q + head * head_dim;
      if (weights.query_norm != nullptr) scale_row(from, weights.query_norm, head_dim);
      rotate(from, cos, sin, head_dim);
      convert(from, head_dim, to + head * head_dim);
    }
    for (int head = 0; head < config_.num_kv_heads; ++head) {
      float* from = k + head * head_dim;
      if (weights.key_norm != nullptr) scale_row(from, weights.key_norm, head_dim);
      rotate(from, cos, sin, head_dim);
      convert(from, head_dim, key);
      convert(v + head * head_dim, head_dim, value);
      cache.write(slots_[row], head, key, value);
    }
  }

  float inverse_rms(const float* x, int size) const {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < size; i += kLanes) {
      const __mmask16 mask = size - i >= kLanes ? 0xffff : (1u << (size - i)) - 1;
      const __m512 values = _mm512_maskz_loadu_ps(mask, x + i);
      sum = _mm512_fmadd_ps(values, values, sum);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / float(size) + config_.norm_eps);
  }

  void scale_row(float* x, const float* weights, int size) const {
    const float factor = inverse_rms(x, size);
    for (int i = 0; i < size; ++i) x[i] = x[i] * factor * weights[i];
  }

  void norm_row(const float* from, const float* weights, T* to) const {
    const __m512 factor = _mm512_set1_ps(inverse_rms(from, config_.hidden_size));
    for (int i = 0; i < config_.hidden_size; i += kLanes) {
      store16(to + i, _mm512_mul_ps(_mm512_mul_ps(load16(from + i), factor), load16(weights + i)));
    }
  }

  template <class Worker>
  void norm_rows(const float* weights, int first, int count, const float* hidden, Worker& member) {
    const size_t size = config_.hidden_size;
    for_rows(member, count, [&](int row) {
      norm_row(&hidden[(first + row) * size], weights, &normed_[(first + row) * size]);
    });
  }

  void add_row(const T* from, float* to, bool first) const {
    for (int i = 0; i < config_.hidden_size; i += kLanes) {
      const __m512 values = load16(from + i);
      store16(to + i, first ? values : _mm512_add_ps(values, load16(to + i)));
    }
  }

  template <class Worker, class Work>
  static void for_rows(Worker& member, int num_rows, Work&& work) {
    member.ranges(num_rows, [&](int first, int stop) {
      for (int row = first; row < stop; ++row) work(row);
    });
  }

  Shape shape(const Step& step) const {
    return {config_.num_heads, config_.num_kv_heads, config_.head_dim, padded(config_.head_dim, kPanel), step.block_size};
  }

  const Config config_;
  const std::vector<LayerWeights> layers_;
  const float* const final_norm_;
  const Linear head_;
  Step step_;
  std::vector<Scratch<T>> scratch_;
  std::vector<float> hidden_, qkv_, output_hidden_;
  std::vector<T> normed_, queries_, attended_, gated_, output_attended_;
  std::vector<Slot> slots_;
  std::vector<AttentionItem> items_;
  const std::function<void(Member)> go_;
  Team team_;
};

}  // namespace pagemill
