// Seeded dropout on the CPU: the formula of xtrain/ops/dropout.py, one pass over memory.
//
// Works in blocks that stay in the L1 cache: first the keep decisions of a block, in 64-bit integers,
// then the products. Both loops are plain, so that the compiler vectorises them for its CPU.

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMul1 = 0xBF58476D1CE4E5B9u;
constexpr uint64_t kMul2 = 0x94D049BB133111EBu;
constexpr int64_t kBlock = 1024;
constexpr int64_t kMinPerThread = 1 << 16;  // below this a new thread costs more than it saves

// The last xor-shift of splitmix64 is left out: it cannot change the top 24 bits.
inline uint64_t mix_top_bits(uint64_t key) {
  uint64_t z = key + kGamma;
  z = (z ^ (z >> 30)) * kMul1;
  return (z ^ (z >> 27)) * kMul2;
}

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Float32 {
  using Storage = float;
  using Compute = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};

struct Float64 {
  using Storage = double;
  using Compute = double;
  static double load(double x) { return x; }
  static double store(double x) { return x; }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Compute = float;
  static float load(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }
  // Round to nearest, ties to even; a NaN keeps its sign and becomes quiet.
  static uint16_t store(float x) {
    const uint32_t u = bits_as<uint32_t>(x);
    const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x0040u;
    return uint16_t((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
  }
};

struct Float16 {
  using Storage = uint16_t;
  using Compute = float;
  static float load(uint16_t x) {
    // Move exponent and fraction in place, then multiply by 2^(127 - 15): exact, subnormals too.
    const uint32_t magnitude = uint32_t(x & 0x7FFFu) << 13;
    const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7F800000u;  // infinity or NaN
    const uint32_t u = magnitude >= 0x0F800000u ? special : finite;
    return bits_as<float>(u | (uint32_t(x & 0x8000u) << 16));
  }
  // Round to nearest, ties to even.
  static uint16_t store(float x) {
    const uint32_t u = bits_as<uint32_t>(x);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 adding 0.5 leaves the fp16 fraction in the low bits, rounded by the addition.
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
    h = magnitude >= 0x477FF000u ? 0x7C00u : h;  // rounds to 65536 or more
    h = magnitude > 0x7F800000u ? 0x7E00u : h;   // NaN
    return uint16_t(h | ((u >> 16) & 0x8000u));
  }
};

template <typename Type>
void dropout_range(typename Type::Storage* out, const typename Type::Storage* x, int64_t begin,
                   int64_t end, uint64_t seed, uint64_t offset, uint32_t threshold,
                   typename Type::Compute scale) {
  uint32_t draw[kBlock];
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t n = end - start < kBlock ? end - start : kBlock;
    const uint64_t first = offset + uint64_t(start);
    for (int64_t j = 0; j < n; ++j) {
      draw[j] = uint32_t(mix_top_bits(seed ^ ((first + uint64_t(j)) * kGamma)) >> 40);
    }
    for (int64_t j = 0; j < n; ++j) {
      const typename Type::Compute product = Type::load(x[start + j]) * scale;
      out[start + j] = Type::store(draw[j] >= threshold ? product : 0);
    }
  }
}

template <typename Type>
void dropout_all(void* out, const void* x, int64_t n, uint64_t seed, uint64_t offset,
                 uint32_t threshold, double scale, int64_t threads) {
  using Storage = typename Type::Storage;
  const auto run = [=](int64_t begin, int64_t end) {
    dropout_range<Type>(static_cast<Storage*>(out), static_cast<const Storage*>(x), begin, end,
                        seed, offset, threshold, static_cast<typename Type::Compute>(scale));
  };
  const int64_t useful = n / kMinPerThread;
  const int64_t parts = useful < threads ? useful : threads;
  if (parts <= 1) {
    run(0, n);
    return;
  }
  const int64_t step = (n / parts + kBlock - 1) / kBlock * kBlock;
  std::vector<std::thread> workers;
  for (int64_t begin = step; begin < n; begin += step) {
    const int64_t end = begin + step < n ? begin + step : n;
    try {
      workers.emplace_back(run, begin, end);
    } catch (...) {  // no thread to be had: do its part here
      run(begin, end);
    }
  }
  run(0, step < n ? step : n);
  for (auto& worker : workers) worker.join();
}

}  // namespace

// threshold: keep an element when its 24 random bits are >= threshold (2^24 keeps none).
// dtype: 0 fp32, 1 fp64, 2 bf16, 3 fp16. seed and offset are read here, by pointer.
extern "C" int xtrain_dropout(void* out, const void* x, int64_t n, int32_t dtype,
                              const int64_t* seed_ptr, const int64_t* offset_ptr,
                              uint32_t threshold, double scale, int64_t threads) {
  const uint64_t seed = uint64_t(*seed_ptr);
  const uint64_t offset = uint64_t(*offset_ptr);
  switch (dtype) {
    case 0:
      dropout_all<Float32>(out, x, n, seed, offset, threshold, scale, threads);
      return 0;
    case 1:
      dropout_all<Float64>(out, x, n, seed, offset, threshold, scale, threads);
      return 0;
    case 2:
      dropout_all<BFloat16>(out, x, n, seed, offset, threshold, scale, threads);
      return 0;
    case 3:
      dropout_all<Float16>(out, x, n, seed, offset, threshold, scale, threads);
      return 0;
    default:
      return 1;
  }
}
