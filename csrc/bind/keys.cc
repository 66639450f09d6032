// Python's view of keys: a scope turns page hashes into block keys, a batch holds them.
//
// Conversion is one pass over the strings with the GIL held: about as long as reading them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "bind/bind.h"
#include "bind/handles.h"

namespace nb = nanobind;

namespace hpkv::bind {
namespace {

// Python's KeyScope.
struct KeyScope {
  Key mask;
};

std::span<const std::byte> bytes_of(const nb::bytes& raw) {
  return {static_cast<const std::byte*>(raw.data()), raw.size()};
}

KeyBatch batch_from_bytes(const nb::bytes& raw) {
  if (raw.size() % sizeof(Key) != 0) {
    throw nb::value_error(
        ("KeyBatch.from_bytes: " + std::to_string(raw.size()) + " bytes are not a multiple of 32")
            .c_str());
  }
  KeyBatch batch;
  batch.keys.resize(raw.size() / sizeof(Key));
  if (raw.size() != 0) std::memcpy(batch.keys.data(), raw.data(), raw.size());
  return batch;
}

KeyScope scope_from_bytes(const nb::bytes& raw) {
  if (raw.size() != sizeof(Key)) {
    throw nb::value_error(
        ("KeyScope: the mask has " + std::to_string(raw.size()) + " bytes, not 32").c_str());
  }
  return {Key::from_bytes(bytes_of(raw).first<sizeof(Key)>())};
}

[[noreturn]] void refuse_hash(std::size_t index, nb::handle found) {
  const std::string text = nb::cast<std::string>(nb::repr(found));
  throw nb::value_error(("KeyScope.keys: page hash " + std::to_string(index) + " is " +
                         text.substr(0, 80) + ", not a string of 64 hexadecimal digits")
                            .c_str());
}

KeyBatch keys_of(const KeyScope& scope, const nb::list& hashes) {
  KeyBatch batch;
  batch.keys.reserve(hashes.size());
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const nb::handle item = PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyUnicode_Check(item.ptr())) refuse_hash(i, item);
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(item.ptr(), &length);
    if (text == nullptr) throw nb::python_error();
    const auto key = parse_hex_key({text, static_cast<std::size_t>(length)});
    if (!key) refuse_hash(i, item);
    batch.keys.push_back(key->masked(scope.mask));
  }
  return batch;
}

KeyBatch slice_of(const KeyBatch& batch, const nb::slice& slice) {
  const auto [start, stop, step, length] = slice.compute(batch.keys.size());
  static_cast<void>(stop);
  if (step != 1) throw nb::value_error("KeyBatch: slices have step 1");
  const auto begin = batch.keys.begin() + static_cast<std::ptrdiff_t>(start);
  return {{begin, begin + static_cast<std::ptrdiff_t>(length)}};
}

}  // namespace

void bind_keys(nb::module_& module) {
  nb::class_<KeyBatch>(module, "KeyBatch", "An immutable array of 256-bit block keys.")
      .def_static("from_bytes", &batch_from_bytes, nb::arg("raw"))
      .def("__len__", [](const KeyBatch& batch) { return batch.keys.size(); })
      .def("__getitem__", &slice_of)
      .def("__bytes__", [](const KeyBatch& batch) {
        return nb::bytes(reinterpret_cast<const char*>(batch.keys.data()),
                         batch.keys.size() * sizeof(Key));
      });
  nb::class_<KeyScope>(module, "KeyScope",
                       "What is equal for all blocks of one namespace, shard and format.")
      .def(
          "__init__",
          [](KeyScope* self, const nb::bytes& mask) {
            new (self) KeyScope(scope_from_bytes(mask));
          },
          nb::arg("mask"))
      .def("keys", &keys_of, nb::arg("page_hashes"));
}

}  // namespace hpkv::bind
