// A file of cubins, as scripts/kernel_file.py writes it: lines of text that say where each lies, then the cubins.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fp8cutlass {

class KernelFile {
 public:
  // Opens the file and reads its lines. It stays open: one that is put in its place later is not read.
  // Throws std::runtime_error, with the remedy, where there is none, or it is not for this target and of this build.
  KernelFile(std::string path, const char* target, const char* build);
  ~KernelFile();
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;

  // The cubin of a source. Throws where the file has none, or ends too early.
  std::vector<char> read(const std::string& id) const;

  const std::string& path() const { return path_; }

 private:
  struct Place {
    int64_t offset, bytes;
  };
  std::string path_;
  int descriptor_;
  std::map<std::string, Place> places_;
};

}  // namespace fp8cutlass
