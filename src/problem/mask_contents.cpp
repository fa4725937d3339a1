// The rules for a Mask in a call.
#include "problem/mask_contents.hpp"

#include <string>
#include <utility>

#include "problem/refuse.hpp"

namespace regard {
namespace {

// "2 x 8 heads, 4096 x 4096", and of packed sequences the rows of the batch.
std::string text_of(const Sizes& s, bool packed) {
  const auto text = [](int64 a, const char* between, int64 b) {
    return std::to_string(a) + between + std::to_string(b);
  };
  return text(s.batch, " x ", s.heads_q) + " heads, " + text(s.len_q, " x ", s.len_k) +
         (packed ? ", packed in " + text(s.rows_q, " and ", s.rows_k) + " rows" : "");
}

}  // namespace

Mask MaskContents::to_mask(MaskContents contents) {
  Mask mask;
  mask.contents_ = std::make_shared<const MaskContents>(std::move(contents));
  return mask;
}

VisibleTensors visible_tensors(const Attention& a) {
  const MaskContents* const given = MaskContents::of(a.visible);
  if (!given) return {a.mask, a.row_spans, a.key_spans};
  constexpr char kEither[] = "must not be given next to visible";
  require(!a.mask.given(), "mask", a.mask, kEither);
  require(!a.row_spans.given(), "row_spans", a.row_spans, kEither);
  require(!a.key_spans.given(), "key_spans", a.key_spans, kEither);
  return {given->mask, given->row_spans, given->key_spans};
}

void check_made_for(const Mask& mask, const Problem& p) {
  const MaskContents& made = *MaskContents::of(mask);
  const Sizes &own = made.sizes, &s = p.sizes;
  if (made.packed == p.packed && own.batch == s.batch && own.heads_q == s.heads_q &&
      own.len_q == s.len_q && own.len_k == s.len_k && own.rows_q == s.rows_q &&
      own.rows_k == s.rows_k) {
    return;
  }
  refuse("visible", "a Mask for " + text_of(own, made.packed),
         "the call has " + text_of(s, p.packed));
}

void check_made_on(const Mask& mask, const Device& device) {
  const std::string own = to_string(MaskContents::of(mask)->device), of_call = to_string(device);
  if (own != of_call) refuse("visible", "a Mask on " + own, "the call is on " + of_call);
}

std::string to_string(const Device& device) {
  switch (device.kind) {
    case Device::Kind::cuda:
      return "cuda:" + std::to_string(device.index);
    case Device::Kind::chip:
      return printed(device.name);
    default:
      return "cpu";
  }
}

}  // namespace regard
