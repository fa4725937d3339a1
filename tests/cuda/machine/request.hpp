// A cooperative call of one thread, on its own stack while it waits for the others.
#pragma once

#include "machine.hpp"

namespace regard::emulated {

enum class Call : unsigned char {
  sync_block,
  sync_cluster,
  any_in_block,
  sync_warp,
  any_in_warp,
  shuffle,
  ldmatrix,
  multiply,
  bar_sync,
  bar_arrive,
  stmatrix,
  wgmma_wait,
  exit,
};

struct Request {
  Call call;
  Where where = {};
  bool value = false;  // a vote; whether matrices are transposed
  uint64 bits = 0;     // shuffles
  uint64 received = 0;
  int from = 0;     // a lane; the number of a barrier; groups that may be under way
  int threads = 0;  // of a barrier
  uint32 row = 0;   // ldmatrix
  uint32 (*matrices)[4] = nullptr;
  Format format = Format::f16;  // products
  float (*d)[4] = nullptr;
  const uint32 (*a)[4] = nullptr;
  uint32 b[2] = {0, 0};
};

}  // namespace regard::emulated
