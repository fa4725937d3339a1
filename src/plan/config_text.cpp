// A KernelConfig as designated initialisers, in the order of its members.
#include "plan/config_text.hpp"

#include <iterator>

namespace regard {
namespace {

constexpr const char* kKernels[kKernelCount] = {"forward",       "combine",      "delta",
                                                "backward",      "key_gradient", "query_gradient",
                                                "bias_gradient", "convert_dq",   "convert_dbias",
                                                "sink_gradient", "planes",       "copy_inputs"};
constexpr const char* kTypes[] = {"none", "f64", "f32", "f16", "bf16", "boolean", "i32"};

// "Name{.a = 1, .b = true}", without the members that equal their defaults.
class Initialisers {
 public:
  explicit Initialisers(const char* type) : text_(std::string("regard::") + type + "{") {}

  void always(const char* member, const std::string& value) {
    if (any_) text_ += ", ";
    any_ = true;
    text_.append(".").append(member).append(" = ").append(value);
  }
  void number(const char* member, int value, int standard) {
    if (value != standard) always(member, std::to_string(value));
  }
  void flag(const char* member, bool value, bool standard) {
    if (value != standard) always(member, value ? "true" : "false");
  }
  void word(const char* member, const char* type, const char* value) {
    always(member, std::string("regard::") + type + "::" + value);
  }

  bool any() const { return any_; }
  std::string text() const { return text_ + "}"; }

 private:
  std::string text_;
  bool any_ = false;
};

Initialisers initialisers(const Features& f) {
  constexpr Features standard;
  // Fails where a member is added: it must be added below too.
  [[maybe_unused]] const auto& [m1, m2, m3, m4, m5, m6, m7, m8] = f;
  Initialisers x("Features");
  x.flag("softcap", f.softcap, standard.softcap);
  x.flag("bias", f.bias, standard.bias);
  x.flag("mask", f.mask, standard.mask);
  x.flag("alibi", f.alibi, standard.alibi);
  x.flag("sink", f.sink, standard.sink);
  x.flag("dropout", f.dropout, standard.dropout);
  x.flag("interval", f.interval, standard.interval);
  x.flag("signed_scale", f.signed_scale, standard.signed_scale);
  return x;
}

Initialisers initialisers(const Tiling& t) {
  constexpr Tiling standard;
  [[maybe_unused]] const auto& [m1, m2, m3, m4, m5, m6, m7] = t;  // as above
  Initialisers x("Tiling");
  x.number("rows", t.rows, standard.rows);
  x.number("keys", t.keys, standard.keys);
  x.number("warps", t.warps, standard.warps);
  x.number("stages", t.stages, standard.stages);
  x.number("slices", t.slices, standard.slices);
  x.number("walkers", t.walkers, standard.walkers);
  x.number("blocks", t.blocks, standard.blocks);
  return x;
}

}  // namespace

const char* name_of(Kernel kernel) { return kKernels[int(kernel)]; }
const char* name_of(Family family) {
  constexpr const char* names[] = {"simt", "mma", "wgmma"};
  return names[int(family)];
}
const char* name_of(Products products) {
  constexpr const char* names[] = {"direct", "tf32x3", "tf32", "f16x3"};
  return names[int(products)];
}
const char* name_of(BiasGradient bias_gradient) {
  constexpr const char* names[] = {"none", "store", "add", "add_to_row", "add_to_column"};
  return names[int(bias_gradient)];
}

std::string to_text(const KernelConfig& c) {
  constexpr KernelConfig standard;
  // Fails where a member is added: it must be added below too.
  [[maybe_unused]] const auto& [m01, m02, m03, m04, m05, m06, m07, m08, m09, m10, m11, m12, m13,
                                m14, m15, m16, m17, m18, m19, m20, m21, m22, m23, m24, m25, m26,
                                m27, m28, m29, m30, m31, m32, m33, m34, m35, m36] = c;
  static_assert(int(Kernel::copy_inputs) + 1 == int(std::size(kKernels)));
  Initialisers x("KernelConfig");
  x.word("kernel", "Kernel", name_of(c.kernel));
  x.word("family", "Family", name_of(c.family));
  x.always("level", std::to_string(c.level));
  if (c.type != standard.type) x.word("type", "Type", kTypes[int(c.type)]);
  if (c.bias_type != standard.bias_type) x.word("bias_type", "Type", kTypes[int(c.bias_type)]);
  if (c.products != standard.products) x.word("products", "Products", name_of(c.products));
  if (const Initialisers features = initialisers(c.features); features.any()) {
    x.always("features", features.text());
  }
  x.number("dim", c.dim, standard.dim);
  x.number("dim_v", c.dim_v, standard.dim_v);
  if (const Initialisers tiling = initialisers(c.tiling); tiling.any()) {
    x.always("tiling", tiling.text());
  }
  x.flag("aligned", c.aligned, standard.aligned);
  x.flag("exact", c.exact, standard.exact);
  x.flag("wide_dout", c.wide_dout, standard.wide_dout);
  x.flag("boxed_out", c.boxed_out, standard.boxed_out);
  x.flag("bias_aligned", c.bias_aligned, standard.bias_aligned);
  x.flag("boxed_bias", c.boxed_bias, standard.boxed_bias);
  x.flag("bias_of_keys", c.bias_of_keys, standard.bias_of_keys);
  x.flag("mask_of_keys", c.mask_of_keys, standard.mask_of_keys);
  x.number("mask_copy", c.mask_copy, standard.mask_copy);
  x.flag("bias_pairs", c.bias_pairs, standard.bias_pairs);
  x.flag("ragged", c.ragged, standard.ragged);
  x.flag("folded", c.folded, standard.folded);
  x.flag("split", c.split, standard.split);
  x.flag("uneven", c.uneven, standard.uneven);
  x.flag("row_terms", c.row_terms, standard.row_terms);
  x.flag("paired", c.paired, standard.paired);
  x.flag("marks", c.marks, standard.marks);
  x.flag("marked", c.marked, standard.marked);
  x.flag("ordered", c.ordered, standard.ordered);
  x.flag("wants_dq", c.wants_dq, standard.wants_dq);
  x.flag("wants_dk", c.wants_dk, standard.wants_dk);
  x.flag("wants_dv", c.wants_dv, standard.wants_dv);
  if (c.bias_gradient != standard.bias_gradient) {
    x.word("bias_gradient", "BiasGradient", name_of(c.bias_gradient));
  }
  x.flag("dbias_aligned", c.dbias_aligned, standard.dbias_aligned);
  x.flag("wide_dbias", c.wide_dbias, standard.wide_dbias);
  x.number("cluster", c.cluster, standard.cluster);
  return x.text();
}

}  // namespace regard
