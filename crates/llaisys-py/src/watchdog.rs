//! `Progress` and `Watchdog`: is the engine stuck? A native thread that never touches Python looks at atomics; what it
//! finds is an atomic too, and a byte in a socket for whoever waits.

use crate::errors::Fault;
use crate::exit;
use llaisys_core::progress::Progress as CoreProgress;
use llaisys_core::progress::{LivenessSample, StallDetector, StallReason, StallWindows};
use pyo3::prelude::*;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The exit code of the process if nothing acknowledges a stall.
const EXIT_CODE: i32 = 70;
/// The byte that tells that the event loop is late; stall reasons are `1` to `5`.
const LATE: u8 = b'L';
/// How often, and how many times, the end looks whether its last line is written.
const SAYING: (Duration, u32) = (Duration::from_millis(10), 50);

/// What a context has done so far. Any thread may read it, while a decode runs and after the context is closed.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Progress {
    pub(crate) core: Arc<CoreProgress>,
}

impl From<Arc<CoreProgress>> for Progress {
    fn from(core: Arc<CoreProgress>) -> Self {
        Self { core }
    }
}

#[pymethods]
impl Progress {
    /// Of a context that is still to be loaded.
    #[new]
    fn new() -> Self {
        Self { core: Arc::default() }
    }

    /// Bytes of weights packed so far, and of all.
    #[getter]
    fn loading(&self) -> (u64, u64) {
        self.core.loading()
    }

    /// Output rows for which pruned argmax ran, and those of them whose token it found.
    #[getter]
    fn argmax_pruning(&self) -> (u64, u64) {
        self.core.argmax_pruning()
    }

    /// Decodes that were called.
    #[getter]
    fn n_steps_begun(&self) -> u64 {
        self.core.sample().n_steps_begun
    }

    /// Decodes that returned.
    #[getter]
    fn n_steps_ended(&self) -> u64 {
        self.core.sample().n_steps_ended
    }

    /// Layers that forward passes have reached.
    #[getter]
    fn n_layers_begun(&self) -> u64 {
        self.core.sample().n_layers_begun
    }

    /// Rows committed.
    #[getter]
    fn n_rows_committed(&self) -> u64 {
        self.core.sample().n_rows_committed
    }

    /// Sequence ids lent.
    #[getter]
    fn n_sequences_acquired(&self) -> u64 {
        self.core.sample().n_sequences_acquired
    }

    /// Sequence ids returned.
    #[getter]
    fn n_sequences_released(&self) -> u64 {
        self.core.sample().n_sequences_released
    }
}

/// What the thread reads and writes. All of it lock-free.
struct Shared {
    progress: Arc<CoreProgress>,
    born: Instant,
    n_waiting: AtomicU64,
    n_running: AtomicU64,
    /// Bits of seconds since `born`.
    deadline_s: AtomicU64,
    /// Bits of seconds.
    predicted_step_s: AtomicU64,
    n_beats: AtomicU64,
    /// Code of the first stall reason; 0 if there is none.
    stall_reason: AtomicU8,
    acknowledged: AtomicBool,
    stop: AtomicBool,
}

impl Shared {
    fn now_s(&self) -> f64 {
        self.born.elapsed().as_secs_f64()
    }

    fn sample(&self) -> LivenessSample {
        let seconds = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Acquire));
        LivenessSample {
            progress: self.progress.sample(),
            n_waiting: self.n_waiting.load(Ordering::Acquire),
            n_running: self.n_running.load(Ordering::Acquire),
            deadline_s: seconds(&self.deadline_s),
            predicted_step_s: seconds(&self.predicted_step_s),
            n_beats: self.n_beats.load(Ordering::Acquire),
        }
    }

    /// Poll until there is a stall or the watchdog is stopped. A panic in here would be a watchdog that is silently
    /// gone, so nothing in here can.
    ///
    /// `listener` never blocks. What it does not accept is lost; the stall reason stays in its atomic.
    fn watch(
        &self,
        mut detector: StallDetector,
        period: Duration,
        mut listener: impl Write,
        exit_after: Option<Duration>,
    ) {
        let mut was_late = false;
        let reason = loop {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if let Some(reason) = detector.poll(&self.sample(), self.now_s()) {
                break reason;
            }
            if detector.is_loop_late() && !was_late {
                let _ = listener.write_all(&[LATE]);
            }
            was_late = detector.is_loop_late();
            std::thread::park_timeout(period);
        };
        self.stall_reason.store(reason as u8, Ordering::Release);
        let _ = listener.write_all(&[b'0' + reason as u8]);
        let Some(exit_after) = exit_after else { return };
        let given_s = self.now_s();
        while self.now_s() - given_s < exit_after.as_secs_f64() {
            if self.acknowledged.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire) {
                return;
            }
            std::thread::park_timeout(period);
        }
        say(format!(
            "llaisys: still running {} s after the watchdog found stall {}; ending with exit code {EXIT_CODE}\n",
            exit_after.as_secs_f64(),
            reason.name(),
        ));
        exit::at_once(EXIT_CODE);
    }
}

/// Writes a line to stderr, on a thread of its own and for half a second at most: stderr may be a full pipe that no
/// process reads.
fn say(line: String) {
    let saying = std::thread::Builder::new().spawn(move || {
        let _ = std::io::stderr().write_all(line.as_bytes());
    });
    let Ok(saying) = saying else { return };
    let (period, n_looks) = SAYING;
    for _ in 0..n_looks {
        if saying.is_finished() {
            return;
        }
        std::thread::park_timeout(period);
    }
}

/// Watches one context's progress, the engine's numbers and the event loop; without a context (its engine is in another
/// process) the event loop alone.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Watchdog {
    shared: Arc<Shared>,
    listener: UnixStream,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[pymethods]
impl Watchdog {
    #[new]
    #[pyo3(signature = (
        progress, *, period_s = 0.25, step_s = 30.0, admit_s = 5.0, commit_s = 30.0, deadline_s = 5.0, late_s = 5.0,
        loop_s = 30.0, step_factor = 20.0, exit_after_s = None
    ))]
    fn new(
        py: Python<'_>,
        progress: Option<&Progress>,
        period_s: f64,
        step_s: f64,
        admit_s: f64,
        commit_s: f64,
        deadline_s: f64,
        late_s: f64,
        loop_s: f64,
        step_factor: f64,
        exit_after_s: Option<f64>,
    ) -> PyResult<Self> {
        let start = || -> Result<Self, Fault> {
            let period = seconds("period_s", period_s)?;
            let exit_after = exit_after_s.map(|s| seconds("exit_after_s", s)).transpose()?;
            for (what, value) in [
                ("step_s", step_s),
                ("admit_s", admit_s),
                ("commit_s", commit_s),
                ("deadline_s", deadline_s),
                ("late_s", late_s),
                ("loop_s", loop_s),
                ("step_factor", step_factor),
            ] {
                seconds(what, value)?;
            }
            let max_poll_gap_s = StallWindows::default().max_poll_gap_s.max(2.0 * period_s);
            let windows = StallWindows {
                step_s,
                admit_s,
                commit_s,
                deadline_s,
                late_s,
                loop_s,
                step_factor,
                max_poll_gap_s,
            };
            let core = progress.map_or_else(Arc::default, |progress| Arc::clone(&progress.core));
            let shared = Arc::new(shared(core));
            // A socket and not a pipe: the watching thread must not block where nobody reads.
            let (reader, writer) = UnixStream::pair()
                .and_then(|(reader, writer)| writer.set_nonblocking(true).map(|()| (reader, writer)))
                .map_err(|e| Fault::Argument(format!("no socket for the watchdog: {e}")))?;
            let watching = Arc::clone(&shared);
            let thread = std::thread::Builder::new()
                .name("llaisys-watchdog".to_owned())
                .spawn(move || watching.watch(StallDetector::new(windows), period, writer, exit_after))
                .map_err(|e| Fault::Argument(format!("cannot start the watchdog's thread: {e}")))?;
            Ok(Self { shared, listener: reader, thread: Mutex::new(Some(thread)) })
        };
        start().map_err(|fault| fault.into_py(py))
    }

    /// The engine's numbers, after each of its turns.
    #[pyo3(signature = (*, waiting, running, seconds_to_deadline = None, predicted_step_s = 0.0))]
    fn report(&self, waiting: u64, running: u64, seconds_to_deadline: Option<f64>, predicted_step_s: f64) {
        let deadline_s = seconds_to_deadline.map_or(f64::INFINITY, |s| self.shared.now_s() + s);
        self.shared.deadline_s.store(deadline_s.to_bits(), Ordering::Release);
        self.shared.predicted_step_s.store(predicted_step_s.to_bits(), Ordering::Release);
        self.shared.n_running.store(running, Ordering::Release);
        self.shared.n_waiting.store(waiting, Ordering::Release);
    }

    /// The event loop came round.
    fn beat(&self) {
        self.shared.n_beats.fetch_add(1, Ordering::Release);
    }

    /// `V1` to `V5`, or None.
    #[getter]
    fn stall_reason(&self) -> Option<&'static str> {
        StallReason::from_code(self.shared.stall_reason.load(Ordering::Acquire)).map(StallReason::name)
    }

    /// The reading end of the socket.
    fn fileno(&self) -> i32 {
        self.listener.as_raw_fd()
    }

    /// Acknowledge the stall: the process does not exit.
    fn acknowledge(&self) {
        self.shared.acknowledged.store(true, Ordering::Release);
    }

    /// Ends the thread; idempotent.
    fn close(&self, py: Python<'_>) {
        self.shared.stop.store(true, Ordering::Release);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            // It touches no Python, so this cannot wait for the GIL; what it may have panicked with is of no use.
            let _ = py.detach(|| thread.join());
        }
    }
}

/// Without `close`: the thread is told and not waited for (after a fork it does not exist).
impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
    }
}

#[allow(clippy::disallowed_methods, reason = "the watchdog's one clock; the core is given its seconds")]
fn shared(progress: Arc<CoreProgress>) -> Shared {
    Shared {
        progress,
        born: Instant::now(),
        n_waiting: AtomicU64::new(0),
        n_running: AtomicU64::new(0),
        deadline_s: AtomicU64::new(f64::INFINITY.to_bits()),
        predicted_step_s: AtomicU64::new(0.0_f64.to_bits()),
        n_beats: AtomicU64::new(0),
        stall_reason: AtomicU8::new(0),
        acknowledged: AtomicBool::new(false),
        stop: AtomicBool::new(false),
    }
}

/// A span of time that can be one: above 0, at most a day.
fn seconds(what: &str, value: f64) -> Result<Duration, Fault> {
    if value > 0.0 && value <= 86_400.0 {
        return Ok(Duration::from_secs_f64(value));
    }
    Err(Fault::Argument(format!("{what} is {value}, allowed are above 0 to 86400")))
}
