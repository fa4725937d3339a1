// The members of a KernelConfig and of its parts by name: the one list behind a kernel's text, its
// hash, and what a caller may force. A member that is missing here stops the build.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

template <class Struct, class Value>
struct Member {
  const char* name;
  Value Struct::*value;
};
template <class Struct, class Value>  // clang 16 deduces nothing from an aggregate
Member(const char*, Value Struct::*) -> Member<Struct, Value>;

// How many members an aggregate has: the most that its braces take.
struct AnyValue {
  template <class Value>
  operator Value() const;
};
template <class Struct, std::size_t... I>
constexpr bool has_room(std::index_sequence<I...>) {
  return requires { Struct{(void(I), AnyValue{})...}; };
}
template <class Struct, std::size_t kCount = 0>
constexpr std::size_t member_count() {
  if constexpr (has_room<Struct>(std::make_index_sequence<kCount + 1>())) {
    return member_count<Struct, kCount + 1>();
  } else {
    return kCount;
  }
}

template <class Struct>
struct Listed;  // what follows: name, and the members in their order

#define REGARD_MEMBER(member) \
  Member { #member, &Struct::member }
#define REGARD_LISTED(type, ...)                                                           \
  template <>                                                                              \
  struct Listed<type> {                                                                    \
    using Struct = type;                                                                   \
    static constexpr const char* kName = #type;                                            \
    static constexpr auto kMembers = std::tuple{__VA_ARGS__};                              \
    static_assert(std::tuple_size_v<decltype(kMembers)> == member_count<Struct>(), #type); \
  }

REGARD_LISTED(Features, REGARD_MEMBER(softcap), REGARD_MEMBER(bias), REGARD_MEMBER(mask),
              REGARD_MEMBER(row_spans), REGARD_MEMBER(key_spans), REGARD_MEMBER(alibi),
              REGARD_MEMBER(sink), REGARD_MEMBER(dropout), REGARD_MEMBER(positions),
              REGARD_MEMBER(interval), REGARD_MEMBER(signed_scale));
REGARD_LISTED(Tiling, REGARD_MEMBER(rows), REGARD_MEMBER(keys), REGARD_MEMBER(warps),
              REGARD_MEMBER(stages), REGARD_MEMBER(slices), REGARD_MEMBER(key_warps),
              REGARD_MEMBER(min_blocks));
REGARD_LISTED(BiasForm, REGARD_MEMBER(type), REGARD_MEMBER(aligned), REGARD_MEMBER(one_row),
              REGARD_MEMBER(by_tma));
REGARD_LISTED(MaskForm, REGARD_MEMBER(one_row), REGARD_MEMBER(copy_bytes), REGARD_MEMBER(as_bits));
REGARD_LISTED(RowTerms, REGARD_MEMBER(used), REGARD_MEMBER(joined), REGARD_MEMBER(lse_in_product),
              REGARD_MEMBER(delta_in_product));
REGARD_LISTED(Wanted, REGARD_MEMBER(dq), REGARD_MEMBER(dk), REGARD_MEMBER(dv));
REGARD_LISTED(DbiasForm, REGARD_MEMBER(how), REGARD_MEMBER(pairs), REGARD_MEMBER(aligned),
              REGARD_MEMBER(is_f32));
REGARD_LISTED(KernelConfig, REGARD_MEMBER(kernel), REGARD_MEMBER(family), REGARD_MEMBER(level),
              REGARD_MEMBER(type), REGARD_MEMBER(products), REGARD_MEMBER(features),
              REGARD_MEMBER(dim), REGARD_MEMBER(dim_v), REGARD_MEMBER(sums_dim),
              REGARD_MEMBER(tiling), REGARD_MEMBER(aligned), REGARD_MEMBER(exact_dims),
              REGARD_MEMBER(dout_is_f32), REGARD_MEMBER(out_by_tma), REGARD_MEMBER(bias),
              REGARD_MEMBER(mask), REGARD_MEMBER(varlen), REGARD_MEMBER(seed_in_memory),
              REGARD_MEMBER(pack_gqa), REGARD_MEMBER(split_kv), REGARD_MEMBER(split_q),
              REGARD_MEMBER(merges_splits), REGARD_MEMBER(stream_k), REGARD_MEMBER(continues),
              REGARD_MEMBER(whole_keys), REGARD_MEMBER(given_delta), REGARD_MEMBER(skips_blocks),
              REGARD_MEMBER(tile_map), REGARD_MEMBER(tile_order), REGARD_MEMBER(row_terms),
              REGARD_MEMBER(cta_pair), REGARD_MEMBER(flags_nonfinite), REGARD_MEMBER(repeats_rows),
              REGARD_MEMBER(only_flagged), REGARD_MEMBER(rows_outer), REGARD_MEMBER(persistent),
              REGARD_MEMBER(ordered_dq), REGARD_MEMBER(wanted), REGARD_MEMBER(dbias),
              REGARD_MEMBER(cluster));

#undef REGARD_MEMBER
#undef REGARD_LISTED

// Calls visit(name, value of the member) for every member of x, in the order of its type.
template <class Struct, class Visit>
constexpr void for_each_member(Struct& x, const Visit& visit) {
  std::apply([&](const auto&... member) { (visit(member.name, x.*member.value), ...); },
             Listed<std::remove_const_t<Struct>>::kMembers);
}

// What a caller forces of a tiling: members that are 0 are not named.
inline Tiling overridden(Tiling tiling, const Tiling& by) {
  std::apply(
      [&](const auto&... m) {
        ((tiling.*m.value = by.*m.value > 0 ? by.*m.value : tiling.*m.value), ...);
      },
      Listed<Tiling>::kMembers);
  return tiling;
}

}  // namespace regard
