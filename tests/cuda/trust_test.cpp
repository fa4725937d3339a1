// Which files are trusted: owners, modes, links, groups, namespaces.
#include "cuda/trust.hpp"

#include <fcntl.h>
#include <linux/posix_acl_xattr.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/cuda/fake.hpp"

using namespace regard::cuda_backend;
using namespace regard::tests;
namespace fs = std::filesystem;

namespace {

constexpr uid_t kOther = 12345;

// A folder with above/file in it, all of the user alone.
class Files {
 public:
  Files() {
    fs::create_directory(above());
    std::ofstream(file()) << "x";
    chmod(above().c_str(), 0755);
    chmod(file().c_str(), 0644);
  }
  const std::string& folder() const { return cache_.folder(); }
  std::string above() const { return folder() + "/above"; }
  std::string file() const { return above() + "/file"; }

 private:
  const EmptyCache cache_;
};

std::string fault(const std::string& path) { return trusted_path(path).fault; }
bool is_root() { return geteuid() == 0; }

TEST_SUITE_BEGIN("cuda_trust");

TEST_CASE("a file of the user, by any absolute name") {
  const Files files;
  const std::string name = files.file();
  fs::create_symlink("above", files.folder() + "/link");
  fs::create_symlink(files.folder() + "/link/file", files.folder() + "/second");
  for (const std::string& path :
       {name, "//" + name, files.above() + "/./../above//file", files.folder() + "/link/file",
        files.folder() + "/second", files.folder() + "/link/../above/file"}) {
    const TrustedPath found = trusted_path(path);
    CHECK_MESSAGE(found.fault == "", path);
    CHECK(found.exists);
    CHECK(found.path == name);
  }
  CHECK(fault("/usr/bin") == "");
  CHECK(fault("/") == "");
}

TEST_CASE("what is not there, and names that are not absolute") {
  const Files files;
  fs::create_symlink("loop", files.folder() + "/loop");
  for (const std::string& path :
       {files.folder() + "/none", files.file() + "/below", files.folder() + "/loop",
        std::string("above/file"), std::string("")}) {
    CHECK_FALSE(trusted_path(path).exists);
    CHECK_MESSAGE(fault(path) != "", path);
  }
}

TEST_CASE("what others may write") {
  const Files files;
  chmod(files.file().c_str(), 0646);
  CHECK(fault(files.file()) == "can be written by others (mode 0646)");
  CHECK(trusted_path(files.file()).exists);
  chmod(files.file().c_str(), 0644);
  chmod(files.above().c_str(), 0757);
  CHECK(fault(files.above()) == "can be written by others (mode 0757)");
  CHECK(fault(files.file()) ==
        "is reached through " + files.above() + ", which can be written by others (mode 0757)");
  fs::create_symlink(files.file(), files.folder() + "/link");
  CHECK(fault(files.folder() + "/link") == fault(files.file()));
}

TEST_CASE("a sticky folder may be above, but is not trusted itself") {
  const Files files;
  chmod(files.above().c_str(), 01777);
  CHECK(fault(files.file()) == "");
  for (const char* end : {"", "/", "/.", "/../above"}) {
    CHECK_MESSAGE(fault(files.above() + end).ends_with("can be written by others (mode 1777)"),
                  end);
  }
  if (!is_root()) return;
  const std::string link = files.above() + "/link";
  fs::create_symlink("file", link);
  CHECK(fault(link) == "");
  REQUIRE(lchown(link.c_str(), kOther, kOther) == 0);
  CHECK(fault(link) == "belongs to another user (uid 12345)");
}

TEST_CASE("what belongs to others" * doctest::skip(!is_root())) {
  const Files files;
  REQUIRE(chown(files.above().c_str(), kOther, 0) == 0);
  CHECK(fault(files.above()) == "belongs to another user (uid 12345)");
  CHECK(fault(files.file()) ==
        "is reached through " + files.above() + ", which belongs to another user (uid 12345)");
}

TEST_CASE("a group may write if it is the user's own" * doctest::skip(!is_root())) {
  const Files files;
  chmod(files.above().c_str(), 0775);
  CHECK(fault(files.file()) == "");
  const int descriptor = open(files.above().c_str(), O_RDONLY);
  CHECK(trust_fault(descriptor) == "");
  REQUIRE(chown(files.above().c_str(), 0, kOther) == 0);
  CHECK(fault(files.above()) == "can be written by others (mode 0775)");
  CHECK(trust_fault(descriptor) == "can be written by others (mode 0775)");
  close(descriptor);
}

TEST_CASE("an access control list may let anybody write") {
  const Files files;
  struct {
    posix_acl_xattr_header header{POSIX_ACL_XATTR_VERSION};
    posix_acl_xattr_entry entries[5] = {{0x01, 7, ~0u},     // the owner
                                        {0x02, 7, kOther},  // a user
                                        {0x04, 5, ~0u},     // the group
                                        {0x10, 7, ~0u},   // the most of both, shown as the group's
                                        {0x20, 5, ~0u}};  // others
  } list;
  const std::string folder = files.above();
  if (setxattr(folder.c_str(), "system.posix_acl_access", &list, sizeof list, 0) != 0) {
    MESSAGE("not tried: this file system has no access control lists");
    return;
  }
  CHECK(fault(folder) == "can be written by others (mode 0775)");
}

// Runs in a user namespace that knows the user alone, under another number.
template <class Test>
int in_namespace(const Test& test) {
  const pid_t child = fork();
  if (child == 0) {
    const std::string map = "1000 " + std::to_string(geteuid()) + " 1";
    if (unshare(CLONE_NEWUSER) != 0) _exit(77);
    std::ofstream file("/proc/self/uid_map");
    if (!(file << map << std::flush) || geteuid() != 1000) _exit(77);
    _exit(test());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

TEST_CASE("folders above may belong to the host of a user namespace" * doctest::skip(!is_root())) {
  const Files files;
  chmod(files.folder().c_str(), 0755);
  REQUIRE(chown(files.above().c_str(), kOther, kOther) == 0);
  const int status = in_namespace([&] {
    if (!fault(files.file()).empty()) return 1;
    if (fault(files.above()).empty()) return 2;
    return 0;
  });
  if (status == 77) {
    MESSAGE("not tried: no user namespaces here");
    return;
  }
  CHECK(status == 0);
  CHECK(fault(files.file()) != "");
  // In a sticky folder it may be anybody's.
  chmod(files.folder().c_str(), 01777);
  CHECK(in_namespace([&] { return fault(files.file()).empty() ? 1 : 0; }) == 0);
}

TEST_SUITE_END();

}  // namespace
