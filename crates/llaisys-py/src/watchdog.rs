//! `Progress` and `Watchdog`: detect a stalled engine. A native thread that calls no Python polls atomics. It publishes
//! its result in an atomic, and as a byte in a socket.

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
/// The byte for a late event loop; stall reasons are `1` to `5`.
const LATE: u8 = b'L';
/// `StallWindows::max_poll_gap_s` of a watchdog that polls at least twice in this time, in seconds.
const MAX_POLL_GAP_S: f64 = 1.0;
/// Interval and number of the polls for the end of the last write to stderr.
const WRITE_POLL: (Duration, u32) = (Duration::from_millis(10), 50);

/// Progress counters of a context. Any thread may read them, also while a decode runs and after the context is closed.
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
    /// Counters for a context that is loaded later.
    #[new]
    fn new() -> Self {
        Self { core: Arc::default() }
    }

    /// Bytes of weights packed so far and in total.
    #[getter]
    fn loading(&self) -> (u64, u64) {
        self.core.loading()
    }

    /// Output rows for which pruned argmax ran, and those for which it found the token.
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

    /// Layers that forward passes have begun.
    #[getter]
    fn n_layers_begun(&self) -> u64 {
        self.core.sample().n_layers_begun
    }

    /// Rows committed.
    #[getter]
    fn n_rows_committed(&self) -> u64 {
        self.core.sample().n_rows_committed
    }

    /// Sequence ids acquired.
    #[getter]
    fn n_sequences_acquired(&self) -> u64 {
        self.core.sample().n_sequences_acquired
    }

    /// Sequence ids released.
    #[getter]
    fn n_sequences_released(&self) -> u64 {
        self.core.sample().n_sequences_released
    }
}

/// The state that the thread shares with the Python object, without locks.
struct Shared {
    progress: Arc<CoreProgress>,
    start: Instant,
    n_waiting: AtomicU64,
    n_running: AtomicU64,
    /// Bits of seconds since `start`.
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
        self.start.elapsed().as_secs_f64()
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

    /// Polls until there is a stall or the watchdog is stopped. Nothing in this function can panic, because a panic
    /// would end the watchdog silently.
    ///
    /// `listener` never blocks. A byte that it does not accept is lost; the stall reason stays in its atomic.
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
        let stalled_s = self.now_s();
        while self.now_s() - stalled_s < exit_after.as_secs_f64() {
            if self.acknowledged.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire) {
                return;
            }
            std::thread::park_timeout(period);
        }
        write_to_stderr(format!(
            "llaisys: still running {} s after the watchdog found stall {}; ending with exit code {EXIT_CODE}\n",
            exit_after.as_secs_f64(),
            reason.name(),
        ));
        exit::at_once(EXIT_CODE);
    }
}

/// Writes a line to stderr on a separate thread, and waits for it up to half a second: stderr may be a full pipe that
/// no process reads.
fn write_to_stderr(line: String) {
    let writer = std::thread::Builder::new().spawn(move || {
        let _ = std::io::stderr().write_all(line.as_bytes());
    });
    let Ok(writer) = writer else { return };
    let (period, n_polls) = WRITE_POLL;
    for _ in 0..n_polls {
        if writer.is_finished() {
            return;
        }
        std::thread::park_timeout(period);
    }
}

/// Watches the progress of one context, the engine's state and the event loop. Without a context (the engine is in
/// another process) it watches only the event loop.
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
            let windows = StallWindows {
                step_s,
                admit_s,
                commit_s,
                deadline_s,
                late_s,
                loop_s,
                step_factor,
                max_poll_gap_s: MAX_POLL_GAP_S.max(2.0 * period_s),
            };
            let core = progress.map_or_else(Arc::default, |progress| Arc::clone(&progress.core));
            let shared = Arc::new(shared(core));
            // A socket, not a pipe: the watchdog's thread must not block if no process reads.
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

    /// Report the engine's state after each of its iterations.
    #[pyo3(signature = (*, waiting, running, seconds_to_deadline = None, predicted_step_s = 0.0))]
    fn report(&self, waiting: u64, running: u64, seconds_to_deadline: Option<f64>, predicted_step_s: f64) {
        let deadline_s = seconds_to_deadline.map_or(f64::INFINITY, |s| self.shared.now_s() + s);
        self.shared.deadline_s.store(deadline_s.to_bits(), Ordering::Release);
        self.shared.predicted_step_s.store(predicted_step_s.to_bits(), Ordering::Release);
        self.shared.n_running.store(running, Ordering::Release);
        self.shared.n_waiting.store(waiting, Ordering::Release);
    }

    /// Report an iteration of the event loop.
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

    /// Stop the thread; idempotent.
    fn close(&self, py: Python<'_>) {
        self.shared.stop.store(true, Ordering::Release);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            // The thread calls no Python, so joining it cannot deadlock on the GIL. A panic payload is ignored.
            let _ = py.detach(|| thread.join());
        }
    }
}

/// Without `close`, the thread is stopped but not joined: after a fork it does not exist.
impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "the only clock of the watchdog, which passes seconds to the core"
)]
fn shared(progress: Arc<CoreProgress>) -> Shared {
    Shared {
        progress,
        start: Instant::now(),
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

/// Converts a time in seconds. Errors: not above 0, or more than a day.
fn seconds(what: &str, value: f64) -> Result<Duration, Fault> {
    if value > 0.0 && value <= 86_400.0 {
        return Ok(Duration::from_secs_f64(value));
    }
    Err(Fault::Argument(format!("{what} is {value}, allowed are above 0 to 86400")))
}
