//! Times of the steps of a start, from the effects and inputs of the engine. virt-handler requests them for traced starts.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use protocol::{StartStep, StepTiming};

use crate::engine::model::{DomainCall, Effect, Input, JobInput, JobName, Work};

/// Begin of a step, and its end once it has succeeded.
type Times = (SystemTime, Option<SystemTime>);

/// The newest time of each step. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timings(Arc<Mutex<BTreeMap<i32, Times>>>);

impl Timings {
    /// Records the start of the worker.
    pub(crate) fn worker(&self, begin: SystemTime, end: SystemTime) {
        self.begin(StartStep::Worker, begin);
        self.end(StartStep::Worker, end);
    }

    /// Records that an effect begins a step.
    pub(super) fn effect(&self, effect: &Effect, now: SystemTime) {
        match effect {
            Effect::StartDaemon { .. } => self.begin(StartStep::Daemon, now),
            Effect::Work(_, Work::Prepare(_)) => self.begin(StartStep::Prepare, now),
            Effect::Call(_, DomainCall::Define(_)) => self.begin(StartStep::Define, now),
            Effect::Call(_, DomainCall::Create { paused }) => {
                self.begin(StartStep::Create, now);
                if !paused {
                    self.begin(StartStep::Guest, now);
                }
            }
            _ => {}
        }
    }

    /// Records that an input ends a step. `ran_at`: the time of the event that the guest runs.
    pub(super) fn input(&self, input: &Input, now: SystemTime, ran_at: Option<SystemTime>) {
        match input {
            Input::Connected(Ok(true)) => self.end(StartStep::Daemon, now),
            Input::Job(JobName::Start, JobInput::Prepared(Ok(_))) => self.end(StartStep::Prepare, now),
            Input::Job(_, JobInput::Defined(Ok(()))) => self.end(StartStep::Define, now),
            Input::Job(_, JobInput::Created(Ok(()))) => {
                self.end(StartStep::Create, now);
                let mut steps = self.steps();
                if let Some(guest) = steps.get_mut(&i32::from(StartStep::Guest)) {
                    let at = ran_at.unwrap_or(now);
                    *guest = (at, Some(at));
                }
            }
            _ => {}
        }
    }

    /// Returns the steps that have ended.
    pub(crate) fn report(&self) -> Vec<StepTiming> {
        let steps = self.steps();
        let ended = steps.iter().filter_map(|(step, (begin, end))| Some((*step, *begin, (*end)?)));
        ended.map(|(step, begin, end)| StepTiming { step, begin: nanoseconds(begin), end: nanoseconds(end) }).collect()
    }

    fn begin(&self, step: StartStep, at: SystemTime) {
        self.steps().insert(step.into(), (at, None));
    }

    /// Ends a step that has begun. A later connection to the daemon does not end its start again.
    fn end(&self, step: StartStep, at: SystemTime) {
        if let Some((_, end)) = self.steps().get_mut(&i32::from(step)) {
            end.get_or_insert(at);
        }
    }

    fn steps(&self) -> MutexGuard<'_, BTreeMap<i32, Times>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nanoseconds(at: SystemTime) -> u64 {
    u64::try_from(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::hypervisor::HypervisorError;

    fn at(second: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(second)
    }

    fn define() -> Effect {
        Effect::Call(Some(JobName::Start), DomainCall::Define(Box::default()))
    }

    fn create(paused: bool) -> Effect {
        Effect::Call(Some(JobName::Start), DomainCall::Create { paused })
    }

    fn start(input: JobInput) -> Input {
        Input::Job(JobName::Start, input)
    }

    /// Returns step, begin and end in seconds.
    fn report(timings: &Timings) -> Vec<(StartStep, u64, u64)> {
        let second = |nanoseconds: u64| nanoseconds / 1_000_000_000;
        timings.report().iter().map(|timing| (timing.step(), second(timing.begin), second(timing.end))).collect()
    }

    #[test]
    fn steps_that_have_ended_are_reported() {
        let timings = Timings::default();
        timings.worker(at(1), at(2));
        timings.effect(&Effect::StartDaemon { cache: None, request: None }, at(3));
        timings.input(&Input::Connected(Ok(false)), at(4), None);
        timings.input(&Input::Connected(Ok(true)), at(5), None);
        timings.effect(&define(), at(6));
        assert_eq!(report(&timings), [(StartStep::Worker, 1, 2), (StartStep::Daemon, 3, 5)]);
        timings.input(&start(JobInput::Defined(Err(HypervisorError::NoDomain))), at(7), None);
        // The next attempt counts.
        timings.effect(&define(), at(8));
        timings.input(&start(JobInput::Defined(Ok(()))), at(9), None);
        timings.effect(&create(false), at(10));
        timings.input(&start(JobInput::Created(Ok(()))), at(13), Some(at(12)));
        // Connected again.
        timings.input(&Input::Connected(Ok(true)), at(14), None);
        assert_eq!(
            report(&timings),
            [
                (StartStep::Worker, 1, 2),
                (StartStep::Daemon, 3, 5),
                (StartStep::Define, 8, 9),
                (StartStep::Create, 10, 13),
                (StartStep::Guest, 12, 12),
            ]
        );
    }

    #[test]
    fn a_paused_guest_executes_nothing_and_a_missed_event_counts_as_the_end_of_the_start() {
        for (paused, expected) in [(true, None), (false, Some((StartStep::Guest, 3, 3)))] {
            let timings = Timings::default();
            timings.effect(&create(paused), at(1));
            timings.input(&start(JobInput::Created(Ok(()))), at(3), None);
            let guest = report(&timings).into_iter().find(|(step, ..)| *step == StartStep::Guest);
            assert_eq!(guest, expected, "{paused}");
        }
    }
}
