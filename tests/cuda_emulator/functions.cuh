// Stands in for kernels/cuda/functions.cuh where the kernels run on a CPU: see emulator.h.
#pragma once
inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
inline float tanh_(float x) { return tanhf(x); }

inline void *address_of(void *p) { return p; }
template <int BYTES> void copy_ahead(void *to, const void *from) {
  if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) emulated::fail("a copy that is not aligned");
  emulated::current().copies.back().push_back({to, from, BYTES});
  if (emulated::early) memcpy(to, from, BYTES);
}
inline void copies_end() { emulated::current().copies.emplace_back(); }
template <int LATER> void wait_for_copies() {
  auto &groups = emulated::current().copies;
  while (groups.size() > LATER + 1) {
    if (!emulated::early)
      for (const auto &copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
    groups.pop_front();
  }
}
