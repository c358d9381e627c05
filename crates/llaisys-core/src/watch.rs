//! When an engine counts as stuck: verdicts over samples of its progress. A function of what it is shown and of the
//! times it is told; the thread and the clock are the binding's.

use crate::progress::ProgressSample;

/// How long what may go without progress, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Windows {
    /// [`Verdict::StalledStep`]; at least `step_factor` times the predicted step.
    pub step_s: f64,
    /// [`Verdict::NothingAdmitted`].
    pub admit_s: f64,
    /// [`Verdict::NoProgress`]; at least `step_factor` times the predicted step.
    pub commit_s: f64,
    /// [`Verdict::Overdue`].
    pub deadline_s: f64,
    /// [`Judge::is_loop_late`]; no verdict.
    pub late_s: f64,
    /// [`Verdict::LoopLag`].
    pub loop_s: f64,
    /// So many predicted steps are no stall.
    pub step_factor: f64,
    /// What lies between two looks counts for at most this: while the machine suspended the process or gave it no
    /// time, nobody could make progress.
    pub longest_look_s: f64,
}

impl Default for Windows {
    /// The windows of the design (reliability R9).
    fn default() -> Self {
        Self {
            step_s: 30.0,
            admit_s: 5.0,
            commit_s: 30.0,
            deadline_s: 5.0,
            late_s: 5.0,
            loop_s: 30.0,
            step_factor: 20.0,
            longest_look_s: 1.0,
        }
    }
}

/// Why an engine is stuck. The numbers are those of the design.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// V1: inside a step and no layer begun.
    StalledStep = 1,
    /// V2: requests wait, none runs, none is admitted.
    NothingAdmitted = 2,
    /// V3: requests run, but no row is committed and none ends.
    NoProgress = 3,
    /// V4: a waiting request is past its deadline, and nobody ends it.
    Overdue = 4,
    /// V5: the event loop has not come round for the whole window. A loop that is only late is no verdict.
    LoopLag = 5,
}

impl Verdict {
    /// The verdict of a number, 1 to 5.
    pub fn from_code(code: u8) -> Option<Self> {
        let all = [Self::StalledStep, Self::NothingAdmitted, Self::NoProgress, Self::Overdue, Self::LoopLag];
        all.into_iter().find(|verdict| *verdict as u8 == code)
    }

    /// `V1` to `V5`.
    pub fn name(self) -> &'static str {
        ["V1", "V2", "V3", "V4", "V5"][self as usize - 1]
    }
}

/// What is shown at one look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Of the core.
    pub progress: ProgressSample,
    /// Requests that wait for capacity.
    pub n_waiting: u64,
    /// Requests that run.
    pub n_running: u64,
    /// The earliest deadline of a waiting request, on the clock of the looks; infinite: none.
    pub deadline_s: f64,
    /// What the next step is thought to take; 0: unknown.
    pub predicted_step_s: f64,
    /// How often the event loop came round; 0: there is none to watch.
    pub n_beats: u64,
}

/// Looks again and again, and remembers since when each thing has not moved.
#[derive(Debug)]
pub struct Judge {
    windows: Windows,
    /// Time that was watched, without what [`Windows::longest_look_s`] leaves out.
    watched_s: f64,
    last_look_s: Option<f64>,
    step: Still,
    admission: Still,
    commit: Still,
    overdue: Still,
    event_loop: Still,
    loop_is_late: bool,
}

/// Something that should move while a condition holds.
#[derive(Debug, Default)]
struct Still {
    applied: bool,
    key: (u64, u64),
    since_s: f64,
}

impl Still {
    /// For how long the condition has held and the key has stayed.
    fn seconds(&mut self, applies: bool, key: (u64, u64), watched_s: f64) -> f64 {
        // What began or moved between two looks counts from the later one: never too early.
        if !(applies && self.applied) || key != self.key {
            *self = Self { applied: applies, key, since_s: watched_s };
        }
        watched_s - self.since_s
    }
}

impl Judge {
    /// A judge who has seen nothing yet.
    pub fn new(windows: Windows) -> Self {
        Self {
            windows,
            watched_s: 0.0,
            last_look_s: None,
            step: Still::default(),
            admission: Still::default(),
            commit: Still::default(),
            overdue: Still::default(),
            event_loop: Still::default(),
            loop_is_late: false,
        }
    }

    /// Whether at the newest look the event loop had not come round for more than [`Windows::late_s`].
    pub fn is_loop_late(&self) -> bool {
        self.loop_is_late
    }

    /// Looks at `now_s` (rising) and says the first verdict that holds, by number.
    pub fn look(&mut self, sample: &Sample, now_s: f64) -> Option<Verdict> {
        let gap = now_s - self.last_look_s.replace(now_s).unwrap_or(now_s);
        self.watched_s += gap.clamp(0.0, self.windows.longest_look_s);
        let (w, watched, p) = (self.windows, self.watched_s, &sample.progress);
        let slow_step_s = w.step_factor * sample.predicted_step_s;
        // Who is in line is not stuck: whoever computes has a judge of its own.
        let at_work = !p.in_line;
        let in_step = at_work && p.n_steps_begun > p.n_steps_ended;
        let step = self.step.seconds(in_step, (p.n_steps_begun, p.n_layers_begun), watched);
        let event_loop = self.event_loop.seconds(sample.n_beats > 0, (sample.n_beats, 0), watched);
        self.loop_is_late = event_loop > w.late_s;
        // A late loop may have kept the interpreter from the engine's thread, which admits and expires: that time is
        // the loop's fault. If it does not come back, the loop gets the verdict.
        let on_time = !self.loop_is_late;
        let waits = at_work && on_time && sample.n_waiting > 0 && sample.n_running == 0;
        let admission = self.admission.seconds(waits, (p.n_sequences_lent, 0), watched);
        let moved = (p.n_rows_committed, p.n_sequences_returned);
        let commit = self.commit.seconds(at_work && sample.n_running > 0, moved, watched);
        let late_s = now_s - sample.deadline_s;
        let overdue = self.overdue.seconds(on_time && late_s >= 0.0, (0, 0), watched);
        let verdicts = [
            (step > w.step_s.max(slow_step_s), Verdict::StalledStep),
            (admission > w.admit_s, Verdict::NothingAdmitted),
            (commit > w.commit_s.max(slow_step_s), Verdict::NoProgress),
            (late_s > w.deadline_s && overdue > w.deadline_s, Verdict::Overdue),
            (event_loop > w.loop_s, Verdict::LoopLag),
        ];
        verdicts.into_iter().find_map(|(holds, verdict)| holds.then_some(verdict))
    }
}
