#include "copy/stream/verifies.h"

#include <utility>

namespace hpkv::stream {

std::shared_ptr<VerifyTicket> Verifies::submit(Lease lease) {
  const auto job = std::make_shared<cpu::VerifyJob>(std::move(lease));
  if (job->lease.count() == 0) return job->ticket;
  if (core_.faults.take_failure(CopyKind::verify)) job->ticket->report_bad(0);
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && open_.size() < core_.options.queues.verify_tickets_max) {
      open_.insert(job);
      core_.outstanding.add();
      queue_.push(job);
      return job->ticket;
    }
  }
  job->lease.release();
  job->ticket->report_bad(0);
  job->ticket->finish();
  return job->ticket;
}

void Verifies::stop() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  stopping_ = true;
  for (const JobRef& job : open_) job->ticket->report_bad(0);
  queue_.close();
}

void Verifies::run_all() {
  while (std::optional<JobRef> job = queue_.pop()) {
    run(**job);
    {
      const std::lock_guard lock(mutex_);
      open_.erase(*job);
    }
    core_.outstanding.finish();
  }
}

void Verifies::run(cpu::VerifyJob& job) {
  VerifyTicket& ticket = *job.ticket;
  const auto delay = core_.faults.delay(CopyKind::verify, Faults::kEveryLayer);
  if (delay.count() != 0) ticket.sleep(delay);
  // Blocks behind a bad one cannot be promised any more.
  for (std::size_t i = 0; i < job.lease.count() && ticket.matters(i); ++i) {
    if (!core_.trusted(job.lease.refs()[i])) ticket.report_bad(i);
  }
  job.lease.release();
  ticket.finish();
}

}  // namespace hpkv::stream
