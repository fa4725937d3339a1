// How a Problem prints itself.
#include "problem/describe.hpp"
#include "problem/refuse.hpp"

namespace regard {

std::string to_string(const Problem& p) {
  const Sizes& s = p.sizes;
  std::string text = std::to_string(s.batch);
  text.append(" x ").append(std::to_string(s.heads_q));
  if (s.heads_kv != s.heads_q) text.append("/").append(std::to_string(s.heads_kv));
  text.append(" heads, ").append(std::to_string(s.len_q)).append(" x ");
  text.append(std::to_string(s.len_k)).append(", D ").append(std::to_string(s.dim));
  if (s.dim_v != s.dim) text += " Dv " + std::to_string(s.dim_v);
  text.append(", ").append(name_of(p.type));
  const MaskParams& m = p.mask_params;
  if (p.packed) text += ", packed";
  if (p.sequences.used_q || p.sequences.used_k) text += ", seqused";
  if (p.features.positions) text += ", positions";
  if (m.left < 0 && m.right == 0) {
    text += m.top_left ? ", causal top left" : ", causal bottom right";
  } else if (p.features.interval) {
    text += ", window " + std::to_string(m.left) + " " + std::to_string(m.right) +
            (m.top_left ? " top left" : "");
  }
  if (p.features.softcap) text += ", softcap " + printed(p.score.softcap);
  if (p.features.bias) text += std::string(", bias ") + name_of(p.bias.type);
  if (p.features.mask) text += ", mask";
  if (p.features.row_spans) text += ", row spans " + std::to_string(p.row_spans.count);
  if (p.features.key_spans) text += ", key spans " + std::to_string(p.key_spans.count);
  if (p.features.alibi) text += ", alibi";
  if (p.features.sink) text += ", sink";
  if (p.features.dropout) text += ", dropout " + printed(realised_probability(p.dropout));
  if (p.features.dropout && p.seed_in_memory) text += ", seed in memory";
  if (p.continues) text += ", continued";
  if (p.delta.given()) text += ", delta given";
  return text;
}

}  // namespace regard
