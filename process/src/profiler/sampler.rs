//! The process that looks at another one's threads.
//!
//! A hundred times a second each thread that is running (or could, had it a processor) is stopped for as long as it
//! takes to copy its registers and the end of its stack, some ten microseconds; what was called is found out after it
//! runs again. Threads that wait are left alone. Nothing stays attached between two looks: a thread ends and takes
//! signals as ever, and if this process is killed the kernel lets go of what it held.
//!
//! ```text
//! parent             sampler
//!   │ ── a byte ───────▶ │  it may be traced by us now
//!   │ ◀─ `+` ─────────── │  it can be: sampling begins       (`-` and a text: it cannot, and why)
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
    BEGUN,
    pprof::{Label, Location, Mapping, Profile, Sample, Texts, ValueType},
    program::{Look, Program},
};

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(10);
/// Most time that one look stands for, after the machine stood still.
const MAX_STEP: Duration = Duration::from_secs(1);
/// How much of a stack is copied.
const MAX_STACK: usize = 128 << 10;
/// Most different stacks that are kept apart; what comes after them is counted as one.
const MAX_STACKS: usize = 5_000;
/// Most threads that are looked at.
const MAX_THREADS: usize = 1024;

/// The answer that sampling cannot begin; a text follows.
const REFUSED: u8 = b'-';

/// Samples the parent until the input ends, then writes the profile to the output.
///
/// # Errors
/// When the parent cannot be heard or told.
pub fn run() -> io::Result<()> {
    let parent = getppid();
    let (mut input, mut output) = (io::stdin(), io::stdout());
    input.read_exact(&mut [0])?;
    let mut sampler = match Sampler::new(parent) {
        Ok(sampler) => sampler,
        Err(error) => {
            output.write_all(&[REFUSED])?;
            output.write_all(error.to_string().as_bytes())?;
            return output.flush();
        }
    };
    output.write_all(&[BEGUN])?;
    output.flush()?;

    let ended = Arc::new(AtomicBool::new(false));
    let (seen, sampling) = (ended.clone(), thread::current());
    thread::spawn(move || {
        // Whatever comes, or whatever breaks, the end of it is the end.
        let _ = io::copy(&mut input, &mut io::sink());
        seen.store(true, Ordering::Release);
        sampling.unpark();
    });
    while !ended.load(Ordering::Acquire) {
        sampler.look();
        thread::park_timeout(INTERVAL);
    }
    output.write_all(&sampler.profile().encode_to_vec())?;
    output.flush()
}

/// Why a process cannot be sampled.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// What it has loaded is not to be seen.
    #[error("cannot read what process {0} has loaded: {1}")]
    Program(Pid, #[source] io::Error),
    /// Its stacks are not to be seen.
    #[error("cannot open the memory of process {0}: {1}")]
    Memory(Pid, #[source] io::Error),
    /// Its threads are not to be stopped.
    #[error("cannot trace process {0}: {1}")]
    Trace(Pid, #[source] Errno),
}

/// What was counted for a stack.
#[derive(Clone, Copy, Default)]
struct Count {
    looks: i64,
    nanoseconds: i64,
}

/// Name of a thread, and what it had called; the innermost first.
type Stack = (String, Vec<u64>);

/// What is known of a process so far.
pub struct Sampler {
    process: Pid,
    program: Program,
    memory: File,
    began: SystemTime,
    first: Instant,
    last: Instant,
    stacks: HashMap<Stack, Count>,
}

impl Sampler {
    /// Begins. Its first thread is stopped once to see whether that is permitted.
    ///
    /// # Errors
    /// When the process may not be looked at.
    pub fn new(process: Pid) -> Result<Self, SamplerError> {
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

    /// Looks at every thread that runs.
    pub fn look(&mut self) {
        let now = Instant::now();
        let step = now.duration_since(self.last).min(MAX_STEP);
        self.last = now;
        for (thread, name) in running(self.process) {
            let Ok(Some(look)) = self.stop_and_copy(thread) else { continue };
            let mut stack = (name, self.program.frames(&look));
            if self.stacks.len() >= MAX_STACKS && !self.stacks.contains_key(&stack) {
                stack = (stack.0, Vec::new());
            }
            let count = self.stacks.entry(stack).or_default();
            count.looks += 1;
            count.nanoseconds = count.nanoseconds.saturating_add(nanoseconds(step));
        }
    }

    /// Stops a thread, copies what tells where it is, and lets it go. `None`: it is gone.
    fn stop_and_copy(&self, thread: Pid) -> nix::Result<Option<Look>> {
        match ptrace::seize(thread, ptrace::Options::empty()) {
            Ok(()) => {}
            Err(Errno::ESRCH) => return Ok(None),
            Err(error) => return Err(error),
        }
        // A thread that is gone by now has let go of us itself.
        if ptrace::interrupt(thread).is_err() {
            return Ok(None);
        }
        let signal = loop {
            match waitpid(thread, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::PtraceEvent(..)) => break None,
                // One that was on its way to the thread anyway; it is handed over at the end.
                Ok(WaitStatus::Stopped(_, signal)) => break Some(signal),
                Err(Errno::EINTR) => {}
                _ => return Ok(None),
            }
        };
        let look = self.copy(thread);
        match ptrace::detach(thread, signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(look),
            Err(error) => Err(error),
        }
    }

    fn copy(&self, thread: Pid) -> Option<Look> {
        let registers = ptrace::getregs(thread).ok()?;
        let mut stack = vec![0; MAX_STACK];
        let mut read = 0;
        // Less where the stack ends before.
        while let Some(room) = stack.get_mut(read..).filter(|room| !room.is_empty())
            && let Ok(more @ 1..) = self.memory.read_at(room, registers.rsp.wrapping_add(read as u64))
        {
            read += more;
        }
        stack.truncate(read);
        Some(Look { instruction: registers.rip, stack_pointer: registers.rsp, frame_pointer: registers.rbp, stack })
    }

    /// All that was seen.
    #[must_use]
    pub fn profile(&self) -> Profile {
        let mut texts = Texts::new();
        let mut kind = |what, unit| ValueType { r#type: texts.index(what), unit: texts.index(unit) };
        let kinds = vec![kind("samples", "count"), kind("cpu", "nanoseconds")];
        let thread = texts.index("thread");
        let pieces = self.program.pieces();
        let mapping = (1..)
            .zip(pieces)
            .map(|(id, piece)| Mapping {
                id,
                memory_start: piece.loaded.start.wrapping_sub(piece.bias),
                memory_limit: piece.loaded.end.wrapping_sub(piece.bias),
                file_offset: piece.offset,
                filename: texts.index(&piece.file),
                build_id: texts.index(&piece.build_id),
            })
            .collect();
        let mut location = Vec::new();
        let mut known = HashMap::new();
        let mut locate = |address: u64| {
            *known.entry(address).or_insert_with(|| {
                let piece = self.program.piece_of(address);
                let id = location.len() as u64 + 1;
                location.push(Location {
                    id,
                    mapping_id: piece.map_or(0, |piece| piece as u64 + 1),
                    // Elsewhere it would tell where the process has its memory.
                    address: piece.and_then(|piece| pieces.get(piece)).map_or(0, |piece| address - piece.bias),
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

/// The threads that run, with their names.
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

/// From `/proc/<pid>/task/<tid>/stat`. A name may hold anything, brackets too.
fn name_and_state(stat: &str) -> Option<(String, char)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    Some((name.to_owned(), after.trim_start().chars().next()?))
}

#[cfg(test)]
mod tests {
    use std::{
        path::Path,
        process::{Child, Command, Stdio},
    };

    use super::{super::program::name_of, *};

    /// Set for what is sampled, which is this program.
    const SAMPLED: &str = "FERROVIRT_TEST_SAMPLED";
    const NAME: &str = "profiler::sampler::tests::spins_where_it_is_sampled";

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
    fn what_a_process_does_is_seen_and_it_goes_on() {
        let busy = Busy::start();
        // Once a thread has the name of the test, all that it is to do is loaded.
        let spinning = || running(busy.pid()).iter().any(|(_, name)| NAME.starts_with(name.as_str()));
        while !spinning() {
            thread::sleep(INTERVAL);
        }
        let mut sampler = Sampler::new(busy.pid()).unwrap();
        while sampler.stacks.values().map(|count| count.looks).sum::<i64>() < 50 {
            thread::sleep(INTERVAL);
            sampler.look();
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
        // From the function down to the thread's beginning, which is the C library's.
        assert!(names.iter().take(3).any(|name| name.contains("spins_where_it_is_sampled")), "{names:?}");
        assert!(names.last().unwrap().contains("libc.so"), "{names:?}");
        assert!(names.iter().all(|name| !name.is_empty()), "{names:?}");
        assert!(NAME.starts_with(text(most.label[0].str)) && most.value[1] > 0, "{most:?}");
        // Nothing holds it, and it runs.
        let status = std::fs::read_to_string(format!("/proc/{}/status", busy.pid())).unwrap();
        assert!(status.contains("TracerPid:\t0\n"), "{status}");
        assert!(spinning());
    }

    #[test]
    fn who_waits_is_left_alone() {
        let mut asleep = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(asleep.id()).unwrap());
        while running(pid).iter().any(|(thread, _)| *thread == pid) {
            thread::sleep(INTERVAL);
        }
        let mut sampler = Sampler::new(pid).unwrap();
        for _ in 0..5 {
            sampler.look();
        }
        let profile = sampler.profile();
        assert!(profile.sample.iter().map(|sample| sample.value[0]).sum::<i64>() <= 1, "{profile:?}");
        asleep.kill().unwrap();
        asleep.wait().unwrap();
        sampler.look();
        assert!(matches!(Sampler::new(pid), Err(SamplerError::Program(..))));
    }

    #[test]
    fn names_of_threads_may_hold_anything() {
        assert_eq!(name_and_state("12 (a) b) R 1 2"), Some(("a) b".to_owned(), 'R')));
        assert_eq!(name_and_state("12 (tokio-rt-worker) S 1"), Some(("tokio-rt-worker".to_owned(), 'S')));
        assert_eq!(name_and_state(""), None);
        assert_eq!(name_and_state("12 (x)"), None);
    }
}
