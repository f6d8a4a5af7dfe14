//! The process that samples the threads of another process.
//!
//! A hundred times a second it stops each thread that runs or is runnable, for some ten microseconds, to copy its registers and
//! the top of its stack. It unwinds the stack after the thread has resumed. It skips waiting threads. It stays attached to no
//! thread between samples: threads end and receive signals as usual, and if this process is killed the kernel detaches
//! it.
//!
//! ```text
//! parent             sampler
//!   │ ── a byte ───────▶ │  the parent has permitted tracing
//!   │ ◀─ `+` ─────────── │  sampling has started             (`-` and a text: error message)
//!   │ ── end of input ─▶ │
//!   │ ◀─ profile ─────── │
//! ```

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    sys::{
        ptrace,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getppid},
};
use prost::Message;

use super::{
    control::STARTED,
    pprof::{Label, Location, Mapping, Profile, Sample, StringTable, ValueType},
    program::{Program, ThreadSnapshot},
};

/// Sampling interval.
const INTERVAL: Duration = Duration::from_millis(10);
/// Limits the time that a sample counts for, in case the host was suspended.
const MAX_STEP: Duration = Duration::from_secs(1);
/// Bytes copied of a stack.
const MAX_STACK: usize = 128 << 10;
/// Limits distinct stacks. Further stacks are counted as one.
const MAX_STACKS: usize = 5_000;
/// Limits sampled threads.
const MAX_THREADS: usize = 1024;

/// First byte of the answer if sampling cannot start. An error message follows.
const FAILED: u8 = b'-';

/// Samples the parent until the input ends, then writes the profile to the output.
///
/// # Errors
/// Fails if the pipes to the parent fail.
pub(super) fn run() -> io::Result<()> {
    let parent = getppid();
    let (mut input, mut output) = (io::stdin(), io::stdout());
    input.read_exact(&mut [0])?;
    let mut sampler = match Sampler::new(parent) {
        Ok(sampler) => sampler,
        Err(error) => {
            output.write_all(&[FAILED])?;
            output.write_all(error.to_string().as_bytes())?;
            return output.flush();
        }
    };
    output.write_all(&[STARTED])?;
    output.flush()?;

    let ended = Arc::new(AtomicBool::new(false));
    let (seen, sampling) = (ended.clone(), thread::current());
    thread::spawn(move || {
        // Sampling ends with the input, also after an error.
        let _ = io::copy(&mut input, &mut io::sink());
        seen.store(true, Ordering::Release);
        sampling.unpark();
    });
    while !ended.load(Ordering::Acquire) {
        sampler.sample();
        thread::park_timeout(INTERVAL);
    }
    output.write_all(&sampler.profile().encode_to_vec())?;
    output.flush()
}

/// Reasons why a process cannot be sampled.
#[derive(Debug, thiserror::Error)]
pub(super) enum SamplerError {
    /// Its mappings cannot be read.
    #[error("cannot read the memory mappings of process {0}: {1}")]
    Program(Pid, #[source] io::Error),
    /// Its memory cannot be opened.
    #[error("cannot open the memory of process {0}: {1}")]
    Memory(Pid, #[source] io::Error),
    /// Its threads cannot be stopped.
    #[error("cannot trace process {0}: {1}")]
    Trace(Pid, #[source] Errno),
}

/// Counts of a stack.
#[derive(Clone, Copy, Default)]
struct Count {
    looks: i64,
    nanoseconds: i64,
}

/// Name of a thread and its call addresses, innermost first.
type Stack = (String, Vec<u64>);

/// Samples of a process.
pub(super) struct Sampler {
    process: Pid,
    program: Program,
    memory: File,
    began: SystemTime,
    first: Instant,
    last: Instant,
    stacks: HashMap<Stack, Count>,
}

impl Sampler {
    /// Starts sampling. Stops the first thread once to check the permission.
    ///
    /// # Errors
    /// Fails if the process cannot be traced.
    pub(super) fn new(process: Pid) -> Result<Self, SamplerError> {
        let program = Program::read(process.as_raw()).map_err(|error| SamplerError::Program(process, error))?;
        let memory =
            File::open(format!("/proc/{process}/mem")).map_err(|error| SamplerError::Memory(process, error))?;
        let sampler = Self {
            process,
            program,
            memory,
            began: SystemTime::now(),
            first: Instant::now(),
            last: Instant::now(),
            stacks: HashMap::new(),
        };
        sampler.stop_and_copy(process).map_err(|error| SamplerError::Trace(process, error))?;
        Ok(sampler)
    }

    /// Samples every thread that runs.
    pub(super) fn sample(&mut self) {
        let now = Instant::now();
        let step = now.duration_since(self.last).min(MAX_STEP);
        self.last = now;
        for (thread, name) in running(self.process) {
            let Ok(Some(snapshot)) = self.stop_and_copy(thread) else { continue };
            let mut stack = (name, self.program.frames(&snapshot));
            if self.stacks.len() >= MAX_STACKS && !self.stacks.contains_key(&stack) {
                stack = (stack.0, Vec::new());
            }
            let count = self.stacks.entry(stack).or_default();
            count.looks += 1;
            count.nanoseconds = count.nanoseconds.saturating_add(nanoseconds(step));
        }
    }

    /// Stops a thread, copies its registers and stack, and resumes it. Returns `None` if the thread has ended.
    fn stop_and_copy(&self, thread: Pid) -> nix::Result<Option<ThreadSnapshot>> {
        match ptrace::seize(thread, ptrace::Options::empty()) {
            Ok(()) => {}
            Err(Errno::ESRCH) => return Ok(None),
            Err(error) => return Err(error),
        }
        // The kernel has detached a thread that has ended.
        if ptrace::interrupt(thread).is_err() {
            return Ok(None);
        }
        let signal = loop {
            match waitpid(thread, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::PtraceEvent(..)) => break None,
                // A signal for the thread arrived first. It is delivered on resume.
                Ok(WaitStatus::Stopped(_, signal)) => break Some(signal),
                Err(Errno::EINTR) => {}
                _ => return Ok(None),
            }
        };
        let snapshot = self.copy(thread);
        match ptrace::detach(thread, signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(snapshot),
            Err(error) => Err(error),
        }
    }

    fn copy(&self, thread: Pid) -> Option<ThreadSnapshot> {
        let registers = ptrace::getregs(thread).ok()?;
        let mut stack = vec![0; MAX_STACK];
        let mut read = 0;
        // The copy is shorter if the stack ends earlier.
        while let Some(room) = stack.get_mut(read..).filter(|room| !room.is_empty())
            && let Ok(more @ 1..) = self.memory.read_at(room, registers.rsp.wrapping_add(read as u64))
        {
            read += more;
        }
        stack.truncate(read);
        Some(ThreadSnapshot {
            instruction: registers.rip,
            stack_pointer: registers.rsp,
            frame_pointer: registers.rbp,
            stack,
        })
    }

    /// Renders all samples as a profile.
    #[must_use]
    pub(super) fn profile(&self) -> Profile {
        let mut texts = StringTable::new();
        let mut kind = |what, unit| ValueType { r#type: texts.index(what), unit: texts.index(unit) };
        let kinds = vec![kind("samples", "count"), kind("cpu", "nanoseconds")];
        let thread = texts.index("thread");
        let mappings = self.program.mappings();
        let mapping = (1..)
            .zip(mappings)
            .map(|(id, mapping)| Mapping {
                id,
                memory_start: mapping.loaded.start.wrapping_sub(mapping.bias),
                memory_limit: mapping.loaded.end.wrapping_sub(mapping.bias),
                file_offset: mapping.offset,
                filename: texts.index(&mapping.file),
                build_id: texts.index(&mapping.build_id),
            })
            .collect();
        let mut location = Vec::new();
        let mut known = HashMap::new();
        let mut locate = |address: u64| {
            *known.entry(address).or_insert_with(|| {
                let mapping = self.program.mapping_of(address);
                let id = location.len() as u64 + 1;
                location.push(Location {
                    id,
                    mapping_id: mapping.map_or(0, |mapping| mapping as u64 + 1),
                    // An absolute address would reveal the memory layout of the process.
                    address: mapping
                        .and_then(|mapping| mappings.get(mapping))
                        .map_or(0, |mapping| address - mapping.bias),
                });
                id
            })
        };
        let sample = self
            .stacks
            .iter()
            .map(|((name, addresses), count)| Sample {
                location_id: addresses.iter().map(|address| locate(*address)).collect(),
                value: vec![count.looks, count.nanoseconds],
                label: vec![Label { key: thread, str: texts.index(name) }],
            })
            .collect();
        let period = kinds.last().cloned();
        Profile {
            sample_type: kinds,
            sample,
            mapping,
            location,
            string_table: texts.into_all(),
            time_nanos: self.began.duration_since(UNIX_EPOCH).map_or(0, nanoseconds),
            duration_nanos: nanoseconds(self.first.elapsed()),
            period_type: period,
            period: nanoseconds(INTERVAL),
        }
    }
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// Returns the running threads with their names.
fn running(process: Pid) -> Vec<(Pid, String)> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    threads
        .take(MAX_THREADS)
        .flatten()
        .filter_map(|entry| {
            let thread = entry.file_name().to_str()?.parse().ok()?;
            let (name, state) = name_and_state(&std::fs::read_to_string(entry.path().join("stat")).ok()?)?;
            (state == 'R').then(|| (Pid::from_raw(thread), name))
        })
        .collect()
}

/// Parses `/proc/<pid>/task/<tid>/stat`. The name can contain any character, including parentheses.
fn name_and_state(stat: &str) -> Option<(String, char)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    Some((name.to_owned(), after.trim_start().chars().next()?))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        path::Path,
        process::{Child, Command, Stdio},
    };

    use super::{super::program::name_of, *};

    /// Set for the sampled process, which is another instance of this program.
    const SAMPLED: &str = "FERROVIRT_TEST_SAMPLED";
    const NAME: &str = "sampler::tests::spins_where_it_is_sampled";

    /// Runs until its input ends.
    #[test]
    fn spins_where_it_is_sampled() {
        if std::env::var_os(SAMPLED).is_none() {
            return;
        }
        thread::spawn(|| {
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            std::process::exit(0);
        });
        let mut number = 0_u64;
        loop {
            number = std::hint::black_box(number.wrapping_add(1));
        }
    }

    struct Busy(Child);

    impl Busy {
        fn start() -> Self {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([NAME, "--exact", "--nocapture"]).env(SAMPLED, "1").stdin(Stdio::piped());
            Self(command.stdout(Stdio::null()).spawn().unwrap())
        }

        fn pid(&self) -> Pid {
            Pid::from_raw(i32::try_from(self.0.id()).unwrap())
        }
    }

    impl Drop for Busy {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn running_functions_are_sampled_and_the_process_continues() {
        let busy = Busy::start();
        // A thread with the name of the test starts after all code has been loaded.
        let spinning = || running(busy.pid()).iter().any(|(_, name)| NAME.starts_with(name.as_str()));
        while !spinning() {
            thread::sleep(INTERVAL);
        }
        let mut sampler = Sampler::new(busy.pid()).unwrap();
        while sampler.stacks.values().map(|count| count.looks).sum::<i64>() < 50 {
            thread::sleep(INTERVAL);
            sampler.sample();
        }
        let profile = sampler.profile();
        assert_eq!(Profile::decode(profile.encode_to_vec().as_slice()).unwrap(), profile);
        let text = |index: i64| profile.string_table[usize::try_from(index).unwrap()].as_str();
        let place = |id: &u64| {
            let location = profile.location.iter().find(|location| location.id == *id).unwrap();
            let mapping = profile.mapping.iter().find(|mapping| mapping.id == location.mapping_id);
            mapping.map(|mapping| (text(mapping.filename), location.address))
        };
        let most = profile.sample.iter().max_by_key(|sample| sample.value[0]).unwrap();
        let places: Option<Vec<_>> = most.location_id.iter().map(place).collect();
        let places = places.unwrap_or_else(|| panic!("some are nowhere: {profile:?}"));
        let own = std::env::current_exe().unwrap();
        let names: Vec<_> = places
            .iter()
            .map(|(file, address)| if own == Path::new(file) { name_of(file, *address) } else { (*file).to_owned() })
            .collect();
        // The outermost function belongs to the C library.
        assert!(names.iter().take(3).any(|name| name.contains("spins_where_it_is_sampled")), "{names:?}");
        assert!(names.last().unwrap().contains("libc.so"), "{names:?}");
        assert!(names.iter().all(|name| !name.is_empty()), "{names:?}");
        assert!(NAME.starts_with(text(most.label[0].str)) && most.value[1] > 0, "{most:?}");
        // The process is no longer traced and runs.
        let status = std::fs::read_to_string(format!("/proc/{}/status", busy.pid())).unwrap();
        assert!(status.contains("TracerPid:\t0\n"), "{status}");
        assert!(spinning());
    }

    #[test]
    fn waiting_threads_are_skipped() {
        // A program that has answered has been loaded, and waits for input again.
        let mut asleep = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(asleep.id()).unwrap());
        asleep.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        asleep.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        // On a busy host it may wait for a page or a processor, also after it was stopped, before it waits for input.
        let fall_asleep = || {
            let mut asleep_for = 0;
            while asleep_for < 10 {
                asleep_for = if running(pid).iter().any(|(thread, _)| *thread == pid) { 0 } else { asleep_for + 1 };
                thread::sleep(INTERVAL);
            }
        };
        fall_asleep();
        let mut sampler = Sampler::new(pid).unwrap();
        for _ in 0..5 {
            fall_asleep();
            sampler.sample();
        }
        let profile = sampler.profile();
        assert!(profile.sample.iter().map(|sample| sample.value[0]).sum::<i64>() <= 1, "{profile:?}");
        asleep.kill().unwrap();
        asleep.wait().unwrap();
        sampler.sample();
        assert!(matches!(Sampler::new(pid), Err(SamplerError::Program(..))));
    }

    #[test]
    fn thread_names_may_contain_any_character() {
        assert_eq!(name_and_state("12 (a) b) R 1 2"), Some(("a) b".to_owned(), 'R')));
        assert_eq!(name_and_state("12 (tokio-rt-worker) S 1"), Some(("tokio-rt-worker".to_owned(), 'S')));
        assert_eq!(name_and_state(""), None);
        assert_eq!(name_and_state("12 (x)"), None);
    }
}
