//! Detection of a stalled engine from samples of its progress. A pure function of the samples and their times: the
//! thread and the clock are in the binding.

use crate::progress::ProgressSample;

/// How long each kind of progress may be absent, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StallWindows {
    /// [`StallReason::StalledStep`]; at least `step_factor` times the predicted step.
    pub step_s: f64,
    /// [`StallReason::NothingAdmitted`].
    pub admit_s: f64,
    /// [`StallReason::NoProgress`]; at least `step_factor` times the predicted step.
    pub commit_s: f64,
    /// [`StallReason::Overdue`].
    pub deadline_s: f64,
    /// [`StallDetector::is_loop_late`], which is no stall.
    pub late_s: f64,
    /// [`StallReason::LoopLag`].
    pub loop_s: f64,
    /// A step may take this many times its predicted duration.
    pub step_factor: f64,
    /// The time between two polls counts as at most this: a suspended process, or one that got no CPU time, could make
    /// no progress.
    pub max_poll_gap_s: f64,
}

/// Why an engine is stalled. The codes are those of the requirements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StallReason {
    /// V1: a step is running and no layer begins.
    StalledStep = 1,
    /// V2: requests wait, none runs and none is admitted.
    NothingAdmitted = 2,
    /// V3: requests run, but no row is committed and none ends.
    NoProgress = 3,
    /// V4: a waiting request is past its deadline and has not ended.
    Overdue = 4,
    /// V5: the event loop has not completed a round for the whole window. A loop that is only late is no stall.
    LoopLag = 5,
}

impl StallReason {
    /// The reason with a code, 1 to 5.
    pub fn from_code(code: u8) -> Option<Self> {
        let all = [Self::StalledStep, Self::NothingAdmitted, Self::NoProgress, Self::Overdue, Self::LoopLag];
        all.into_iter().find(|reason| *reason as u8 == code)
    }

    /// `V1` to `V5`.
    pub fn name(self) -> &'static str {
        ["V1", "V2", "V3", "V4", "V5"][self as usize - 1]
    }
}

/// The state of the engine at one poll.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LivenessSample {
    /// The counters of the core.
    pub progress: ProgressSample,
    /// Requests that wait for capacity.
    pub n_waiting: u64,
    /// Requests that run.
    pub n_running: u64,
    /// The earliest deadline of a waiting request, on the clock of the polls; infinite if there is none.
    pub deadline_s: f64,
    /// The predicted duration of the next step; 0 if unknown.
    pub predicted_step_s: f64,
    /// Rounds of the event loop; 0 if there is none to watch.
    pub n_beats: u64,
}

/// Polls an engine and remembers since when each kind of progress has been absent.
#[derive(Debug)]
pub struct StallDetector {
    windows: StallWindows,
    /// Time that was watched, without what [`StallWindows::max_poll_gap_s`] leaves out.
    watched_s: f64,
    last_poll_s: Option<f64>,
    step: StallTimer,
    admission: StallTimer,
    commit: StallTimer,
    overdue: StallTimer,
    event_loop: StallTimer,
    loop_is_late: bool,
}

/// The time for which a value has not changed while a condition holds.
#[derive(Debug, Default)]
struct StallTimer {
    applied: bool,
    key: (u64, u64),
    since_s: f64,
}

impl StallTimer {
    /// Seconds for which the condition has held and the key has stayed the same.
    fn seconds(&mut self, applies: bool, key: (u64, u64), watched_s: f64) -> f64 {
        // A change between two polls counts from the later one: never too early.
        if !(applies && self.applied) || key != self.key {
            *self = Self { applied: applies, key, since_s: watched_s };
        }
        watched_s - self.since_s
    }
}

impl StallDetector {
    /// A detector without samples.
    pub fn new(windows: StallWindows) -> Self {
        Self {
            windows,
            watched_s: 0.0,
            last_poll_s: None,
            step: StallTimer::default(),
            admission: StallTimer::default(),
            commit: StallTimer::default(),
            overdue: StallTimer::default(),
            event_loop: StallTimer::default(),
            loop_is_late: false,
        }
    }

    /// Whether at the latest poll the event loop had not completed a round for more than [`StallWindows::late_s`].
    pub fn is_loop_late(&self) -> bool {
        self.loop_is_late
    }

    /// Take a sample at `now_s`, which must not decrease, and return the stall reason with the lowest code that holds.
    pub fn poll(&mut self, sample: &LivenessSample, now_s: f64) -> Option<StallReason> {
        let gap = now_s - self.last_poll_s.replace(now_s).unwrap_or(now_s);
        self.watched_s += gap.clamp(0.0, self.windows.max_poll_gap_s);
        let (w, watched, p) = (self.windows, self.watched_s, &sample.progress);
        let slow_step_s = w.step_factor * sample.predicted_step_s;
        // A context that waits for the pool is not stalled: the one that computes has a detector of its own.
        let at_work = !p.waiting_for_pool;
        let in_step = at_work && p.n_steps_begun > p.n_steps_ended;
        let step = self.step.seconds(in_step, (p.n_steps_begun, p.n_layers_begun), watched);
        let event_loop = self.event_loop.seconds(sample.n_beats > 0, (sample.n_beats, 0), watched);
        self.loop_is_late = event_loop > w.late_s;
        // A late loop may have kept the interpreter from the engine's thread, which admits and expires requests. If the
        // loop does not return, it is the stall.
        let on_time = !self.loop_is_late;
        let waits = at_work && on_time && sample.n_waiting > 0 && sample.n_running == 0;
        let admission = self.admission.seconds(waits, (p.n_sequences_acquired, 0), watched);
        let moved = (p.n_rows_committed, p.n_sequences_released);
        let commit = self.commit.seconds(at_work && sample.n_running > 0, moved, watched);
        let late_s = now_s - sample.deadline_s;
        let overdue = self.overdue.seconds(on_time && late_s >= 0.0, (0, 0), watched);
        let reasons = [
            (step > w.step_s.max(slow_step_s), StallReason::StalledStep),
            (admission > w.admit_s, StallReason::NothingAdmitted),
            (commit > w.commit_s.max(slow_step_s), StallReason::NoProgress),
            (late_s > w.deadline_s && overdue > w.deadline_s, StallReason::Overdue),
            (event_loop > w.loop_s, StallReason::LoopLag),
        ];
        reasons.into_iter().find_map(|(holds, reason)| holds.then_some(reason))
    }
}
