#include "kernel_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "check.h"

namespace fp8cutlass {

namespace {

constexpr char kFormat[] = "fp8cutlass kernels 1";
constexpr char kRemedy[] = ": build or install the package again";
constexpr int64_t kMostBytes = int64_t{1} << 30;  // of a cubin; they have some hundred thousand at most

// Bytes from `offset` on; fewer at the file's end.
std::string read_some(int descriptor, int64_t offset, size_t bytes) {
  std::string text(bytes, '\0');
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(descriptor, text.data() + done, bytes - done, static_cast<off_t>(offset) + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

// The file's lines up to the empty one that ends them; false where there is none.
bool read_lines(int descriptor, std::vector<std::string>& lines) {
  constexpr size_t kChunk = 1 << 16;
  std::string rest;
  for (int64_t offset = 0;;) {
    const std::string more = read_some(descriptor, offset, kChunk);
    if (more.empty()) return false;
    offset += static_cast<int64_t>(more.size());
    rest += more;
    size_t begin = 0;
    for (size_t end; (end = rest.find('\n', begin)) != std::string::npos; begin = end + 1) {
      if (end == begin) return true;
      lines.push_back(rest.substr(begin, end - begin));
    }
    rest.erase(0, begin);
    if (rest.size() > kChunk) return false;  // no text
  }
}

}  // namespace

KernelFile::KernelFile(std::string path, const char* target, const char* build)
    : path_(std::move(path)), descriptor_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (descriptor_ < 0) fail("the kernels for ", target, " cannot be read: ", path_, ": ", strerror(errno), kRemedy);
  const auto refuse = [&](const std::string& why) {
    close(descriptor_);
    fail(path_, " ", why, kRemedy);
  };
  std::vector<std::string> lines;
  if (!read_lines(descriptor_, lines) || lines.size() < 3 || lines[0] != kFormat)
    refuse("is no file of kernels that this library reads");
  if (lines[1] != std::string("target ") + target) refuse("is not for " + std::string(target) + ": " + lines[1]);
  if (lines[2] != std::string("build ") + build)
    refuse("is of another build than the library beside it (where it was built just now, start the process again)");
  for (size_t i = 3; i < lines.size(); ++i) {
    const size_t space = lines[i].find(' ');
    char* end = nullptr;
    Place place{-1, 0};
    if (space != std::string::npos) {
      place.offset = std::strtoll(lines[i].c_str() + space, &end, 10);
      place.bytes = std::strtoll(end, &end, 10);
    }
    if (place.offset < 0 || place.bytes <= 0 || place.bytes > kMostBytes) refuse("has a line without a place");
    places_[lines[i].substr(0, space)] = place;
  }
}

KernelFile::~KernelFile() { close(descriptor_); }

std::vector<char> KernelFile::read(const std::string& id) const {
  const auto found = places_.find(id);
  if (found == places_.end()) fail(path_, " has no kernel ", id, kRemedy);
  const std::string bytes = read_some(descriptor_, found->second.offset, static_cast<size_t>(found->second.bytes));
  if (static_cast<int64_t>(bytes.size()) != found->second.bytes) fail(path_, " ends before kernel ", id, kRemedy);
  return {bytes.begin(), bytes.end()};
}

}  // namespace fp8cutlass
