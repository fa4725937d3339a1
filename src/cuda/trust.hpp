// Which files may become a part of this process: kernels from disk, and libraries opened at run
// time. The kernel cache, REGARD_KERNEL_DIR and the search for NVRTC share this one rule.
//
// A path is trusted if only root and the effective user can have changed what it names: the file
// and every folder above it belong to one of the two, and nobody else may write to them. Symbolic
// links are followed, each link by the same rule. Four cases need a decision:
//
// - A sticky folder (/tmp) above the file is accepted although others may write to it: nobody can
//   rename or delete there what belongs to somebody else.
// - A group may have the right to write if it is root's or the user's private group: the primary
//   group, with the user's name and no other member. Debian, Ubuntu, Fedora and RHEL give every
//   user such a group, and then set umask 002, which makes all folders of these users
//   group-writable. Accounts that have another user's private group as their primary group are not
//   looked for, because directories on a network cannot list them.
// - An access control list takes that exception away, because it may give the right to anybody.
// - In a user namespace (rootless containers), the root of the host appears as the overflow user. A
//   folder above the file may belong to that user, unless it lies in a sticky folder.
#pragma once

#include <string>

namespace regard::cuda_backend {

struct TrustedPath {
  std::string path;     // the same, absolute and without symbolic links, as far as it exists
  bool exists = false;  // as far as this process may look
  std::string fault;    // "can be written by others (mode 0777)"; "" where it is trusted
};
TrustedPath trusted_path(const std::string& path);  // relative paths are never trusted

// The rule for an open file alone; "" where it is trusted. Its folder is the caller's to check.
std::string trust_fault(int descriptor);

// Names come from anybody: a text without the characters that speak to a terminal.
std::string printable(const std::string& text);

}  // namespace regard::cuda_backend
