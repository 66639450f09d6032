#include "disk/reader.h"

#include <algorithm>
#include <cerrno>

#include "base/crc32c.h"
#include "disk/aligned.h"

namespace hpkv::disk {

void Reader::read(std::span<const DiskRef> refs, std::span<std::byte* const> targets,
                  std::span<ReadOutcome> outcomes, bool forget_bad) {
  if (refs.empty()) return;
  const std::size_t most = std::min(refs.size(), kTransferRecords);
  const AlignedBytes pages(most * kPage);
  const std::span headers(&pages.page<RecordHeader>(0), most);
  for (std::size_t at = 0; at < refs.size();) {
    bool descending = false;
    const std::size_t count = neighbours(refs.subspan(at), descending);
    const Run run{refs.subspan(at, count), targets.subspan(at, count), outcomes.subspan(at, count),
                  headers.first(count)};
    std::vector<std::size_t> unreadable;
    if (read_run(run) < 0 && count > 1) unreadable = read_singly(run);
    second_look(run);
    give_up(run, unreadable);
    for (std::size_t i = 0; i < count; ++i) {
      settle_outcome(run.refs[i], run.outcomes[i], forget_bad);
    }
    at += count;
  }
}

int Reader::read_run(const Run& run) {
  int code = 0;
  const RegionFiles::Handle file = context_.files.open(run.refs[0].region, code);
  if (file) {
    const std::int64_t bytes =
        read_records(context_.files.files(), *file, run.refs, run.targets, run.headers);
    code = bytes < 0 ? static_cast<int>(bytes) : 0;
  }
  // A file that is not there has none of its blocks: the index decides whether that is news.
  if (code == -ENOENT) {
    std::fill(run.outcomes.begin(), run.outcomes.end(), ReadOutcome::bad);
    return 0;
  }
  if (code < 0) {
    context_.tally.failed(context_.tally.read_errors, "read", run.refs[0].region, code);
    std::fill(run.outcomes.begin(), run.outcomes.end(), ReadOutcome::io_error);
    return code;
  }
  for (std::size_t i = 0; i < run.refs.size(); ++i) {
    const bool good = matches(run.refs[i], run.headers[i], run.targets[i]);
    run.outcomes[i] = good ? ReadOutcome::ok : ReadOutcome::bad;
  }
  return 0;
}

// One bad sector spoils a long read: its neighbours are asked for by themselves. A disk that fails
// twice more is not asked further. Those that it says it cannot read.
std::vector<std::size_t> Reader::read_singly(const Run& run) {
  std::vector<std::size_t> unreadable;
  int failures = 0;
  for (std::size_t i = 0; i < run.refs.size() && failures < 2; ++i) {
    const int code = read_run(run.one(i));
    if (code < 0) ++failures;
    if (code == -EIO) unreadable.push_back(i);
  }
  return unreadable;
}

// A disk that reads the neighbours works, so what it cannot read is lost. Kept in the index it
// would fail every request for its prefix, and never be written again.
void Reader::give_up(const Run& run, std::span<const std::size_t> unreadable) {
  if (std::ranges::find(run.outcomes, ReadOutcome::ok) == run.outcomes.end()) return;
  for (const std::size_t i : unreadable) run.outcomes[i] = ReadOutcome::bad;
}

// What did not match may have come through a handle of a file that is gone from under its name.
void Reader::second_look(const Run& run) {
  const auto is_bad = [](ReadOutcome outcome) { return outcome == ReadOutcome::bad; };
  if (std::none_of(run.outcomes.begin(), run.outcomes.end(), is_bad)) return;
  context_.files.drop(run.refs[0].region);
  for (std::size_t i = 0; i < run.refs.size(); ++i) {
    if (is_bad(run.outcomes[i]) && read_run(run.one(i)) < 0) return;
  }
}

void Reader::settle_outcome(const DiskRef& ref, ReadOutcome& outcome, bool forget_bad) {
  Tally& tally = context_.tally;
  if (outcome == ReadOutcome::ok) {
    tally.read_blocks.fetch_add(1, std::memory_order_relaxed);
    tally.read_bytes.fetch_add(ref.payload_bytes, std::memory_order_relaxed);
  }
  if (outcome != ReadOutcome::bad) return;
  // The index forgets a block before its place is written again. So if the block is still there,
  // its place was not, and what was read is damage.
  DiskRef now;
  const bool there = context_.catalog->find(ref.key, now) && now.entry_offset == ref.entry_offset &&
                     now.entry_generation == ref.entry_generation;
  if (!there) {
    outcome = ReadOutcome::stale;
    tally.stale_reads.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  tally.bad_blocks.fetch_add(1, std::memory_order_relaxed);
  if (forget_bad) context_.catalog->forget(ref);
}

bool Reader::matches(const DiskRef& ref, const RecordHeader& header, const std::byte* payload) {
  const auto info = context_.pool->name_space(ref.namespace_index);
  if (!info) return false;
  const RecordIdentity identity{context_.header().id,
                                ref.region,
                                ref.file_generation,
                                ref.number,
                                ref.payload_bytes,
                                ref.checksum,
                                ref.key,
                                info->id};
  return header_says(header, identity) &&
         crc32c(std::span(payload, ref.payload_bytes)) == ref.checksum;
}

VerifyReport Reader::verify(const std::function<bool(const VerifyReport&)>& progress, bool fix) {
  VerifyReport report;
  report.total_blocks = context_.catalog->stats().entries;
  std::vector<DiskRef> refs;
  for (std::uint32_t region = 0; region < context_.region_count(); ++region) {
    context_.catalog->entries(region, refs);
    for (std::size_t at = 0; at < refs.size();) {
      bool descending = false;
      const auto rest = std::span<const DiskRef>(refs).subspan(at);
      const std::size_t count = neighbours(rest, descending);
      const std::uint64_t stride = round_up_page(rest[0].payload_bytes);
      const AlignedBytes buffer(count * stride);
      std::vector<std::byte*> targets(count);
      for (std::size_t i = 0; i < count; ++i) targets[i] = buffer.data() + i * stride;
      std::vector<ReadOutcome> outcomes(count);
      read(rest.first(count), targets, outcomes, fix);
      for (std::size_t i = 0; i < count; ++i) {
        ++report.blocks;
        report.bytes += rest[i].payload_bytes;
        if (outcomes[i] == ReadOutcome::bad) ++report.bad;
        if (outcomes[i] == ReadOutcome::stale) ++report.stale;
        if (outcomes[i] == ReadOutcome::io_error) ++report.io_errors;
      }
      at += count;
      if (progress && !progress(report)) return report;
    }
  }
  report.complete = context_.recovered();
  return report;
}

}  // namespace hpkv::disk
