//! Stall reasons as a function of samples and times: each is reported within its window, and never for a busy engine.

use llaisys_core::progress::ProgressSample;
use llaisys_core::progress::{LivenessSample, StallDetector, StallReason, StallWindows};
use proptest::prelude::*;

const PERIOD_S: f64 = 0.25;

/// The windows of reliability requirement R9, which are the defaults of the binding's watchdog.
const WINDOWS: StallWindows = StallWindows {
    step_s: 30.0,
    admit_s: 5.0,
    commit_s: 30.0,
    deadline_s: 5.0,
    late_s: 5.0,
    loop_s: 30.0,
    step_factor: 20.0,
    max_poll_gap_s: 1.0,
};

const IDLE: LivenessSample = LivenessSample {
    progress: ProgressSample {
        waiting_for_pool: false,
        n_steps_begun: 0,
        n_steps_ended: 0,
        n_layers_begun: 0,
        n_rows_committed: 0,
        n_sequences_acquired: 0,
        n_sequences_released: 0,
    },
    n_waiting: 0,
    n_running: 0,
    deadline_s: f64::INFINITY,
    predicted_step_s: 0.0,
    n_beats: 0,
};

/// Polls every period for `seconds`; `change` gets the time. Returns the first stall reason and its time.
fn watch(
    seconds: f64,
    mut sample: LivenessSample,
    change: impl Fn(f64, &mut LivenessSample),
) -> Option<(StallReason, f64)> {
    let mut detector = StallDetector::new(WINDOWS);
    let n_polls = (seconds / PERIOD_S) as u32;
    (0..=n_polls).find_map(|i| {
        let now_s = f64::from(i) * PERIOD_S;
        change(now_s, &mut sample);
        detector.poll(&sample, now_s).map(|reason| (reason, now_s))
    })
}

/// Asserts that `reason` is reported at the first poll later than `window_s` after `from_s`.
fn fires(reason: StallReason, from_s: f64, window_s: f64, found: Option<(StallReason, f64)>) {
    let expected = from_s + window_s + PERIOD_S;
    assert_eq!(found, Some((reason, expected)));
}

#[test]
fn idle_engine_does_not_stall() {
    assert_eq!(watch(3600.0, IDLE, |_, _| ()), None);
}

#[test]
fn step_without_a_layer_is_a_stall() {
    let begin = |now: f64, s: &mut LivenessSample| s.progress.n_steps_begun = u64::from(now >= 10.0);
    fires(StallReason::StalledStep, 10.0, 30.0, watch(100.0, IDLE, begin));
    let ticks_until_20 = |now: f64, s: &mut LivenessSample| {
        begin(now, s);
        s.progress.n_layers_begun = now.min(20.0) as u64;
    };
    fires(StallReason::StalledStep, 20.0, 30.0, watch(100.0, IDLE, ticks_until_20));
    let ticks = |now: f64, s: &mut LivenessSample| {
        begin(now, s);
        s.progress.n_layers_begun = (now / 29.0) as u64;
    };
    assert_eq!(watch(3600.0, IDLE, ticks), None, "slow, with progress");
}

#[test]
fn slow_step_that_was_predicted_is_not_a_stall() {
    let sample = LivenessSample { predicted_step_s: 4.0, ..IDLE };
    let begin = |_: f64, s: &mut LivenessSample| s.progress.n_steps_begun = 1;
    fires(StallReason::StalledStep, 0.0, 80.0, watch(200.0, sample, begin));
    let running = LivenessSample { n_running: 1, ..sample };
    fires(StallReason::NoProgress, 0.0, 80.0, watch(200.0, running, |_, _| ()));
}

/// Another context uses the threads. That context is watched itself, so waiting for it is not a stall of this one.
#[test]
fn waiting_for_the_thread_pool_is_not_a_stall() {
    for (n_waiting, n_running) in [(1, 0), (0, 1), (3, 2)] {
        let line_until_100 = |now: f64, s: &mut LivenessSample| s.progress.waiting_for_pool = now < 100.0;
        let sample = LivenessSample { n_waiting, n_running, ..IDLE };
        let found = watch(300.0, sample, line_until_100);
        let (reason, window_s) =
            if n_running > 0 { (StallReason::NoProgress, 30.0) } else { (StallReason::NothingAdmitted, 5.0) };
        fires(reason, 100.0, window_s, found);
    }
}

#[test]
fn waiting_requests_without_admission_are_a_stall() {
    let wait = |now: f64, s: &mut LivenessSample| s.n_waiting = u64::from(now >= 3.0);
    fires(StallReason::NothingAdmitted, 3.0, 5.0, watch(60.0, IDLE, wait));
    let lent_at_6 = |now: f64, s: &mut LivenessSample| {
        wait(now, s);
        s.progress.n_sequences_acquired = u64::from(now >= 6.0);
    };
    fires(StallReason::NothingAdmitted, 6.0, 5.0, watch(60.0, IDLE, lent_at_6));
    let running = |now: f64, s: &mut LivenessSample| {
        wait(now, s);
        s.n_running = 1;
        s.progress.n_rows_committed = now as u64;
    };
    assert_eq!(watch(3600.0, IDLE, running), None, "waiting behind running requests is load");
}

#[test]
fn iterations_without_commits_are_a_stall() {
    let livelock = |now: f64, s: &mut LivenessSample| {
        s.n_running = 2;
        s.progress.n_steps_begun = (now * 4.0) as u64;
        s.progress.n_steps_ended = s.progress.n_steps_begun;
        s.progress.n_layers_begun = (now * 8.0) as u64;
    };
    fires(StallReason::NoProgress, 0.0, 30.0, watch(60.0, IDLE, livelock));
    let ends = |now: f64, s: &mut LivenessSample| {
        livelock(now, s);
        s.progress.n_sequences_released = (now / 25.0) as u64;
    };
    assert_eq!(watch(600.0, IDLE, ends), None);
}

#[test]
fn missed_deadline_is_a_stall() {
    let sample = LivenessSample { deadline_s: 10.0, n_waiting: 1, n_running: 1, ..IDLE };
    let moving = |now: f64, s: &mut LivenessSample| s.progress.n_rows_committed = now as u64;
    fires(StallReason::Overdue, 10.0, 5.0, watch(60.0, sample, moving));
    let ended_late = |now: f64, s: &mut LivenessSample| {
        moving(now, s);
        // Each waiting request ends three seconds late, and the next one is due by then.
        s.deadline_s = now - now % 4.0 + 1.0;
    };
    assert_eq!(watch(600.0, sample, ended_late), None);
}

#[test]
fn event_loop_without_beats_is_a_stall() {
    let beats_until_8 = |now: f64, s: &mut LivenessSample| s.n_beats = now.min(8.0) as u64;
    fires(StallReason::LoopLag, 8.0, 30.0, watch(60.0, IDLE, beats_until_8));
    assert_eq!(watch(600.0, IDLE, |now, s| s.n_beats = (now / 29.5) as u64 + 1), None, "late, not stuck");
}

/// Late from 5 s without a beat until the next one, and never without a loop to watch.
#[test]
fn late_loop_is_reported_once_per_episode() {
    let mut detector = StallDetector::new(WINDOWS);
    let (mut episodes, mut was_late) = (Vec::new(), false);
    for i in 0..400 {
        let now_s = f64::from(i) * PERIOD_S;
        let n_beats = if now_s < 20.0 { now_s as u64 } else { 20 + ((now_s - 20.0) / 20.0) as u64 };
        assert_eq!(detector.poll(&LivenessSample { n_beats, ..IDLE }, now_s), None);
        if detector.is_loop_late() && !was_late {
            episodes.push(now_s);
        }
        was_late = detector.is_loop_late();
    }
    assert_eq!(episodes, [25.25, 45.25, 65.25, 85.25]);
    let mut detector = StallDetector::new(WINDOWS);
    for i in 0..400 {
        detector.poll(&IDLE, f64::from(i) * PERIOD_S);
        assert!(!detector.is_loop_late());
    }
}

/// An event loop that holds the interpreter keeps the engine's thread from admitting and expiring requests.
#[test]
fn late_loop_suspends_the_stall_reasons_of_the_engine() {
    let waits = LivenessSample { n_waiting: 1, deadline_s: 0.0, n_beats: 1, ..IDLE };
    let back_at_25 = |now: f64, s: &mut LivenessSample| s.n_beats = if now < 25.0 { 1 } else { now as u64 };
    let found = watch(100.0, waits, back_at_25);
    fires(StallReason::NothingAdmitted, 25.0, 5.0, found);
    fires(StallReason::LoopLag, 0.0, 30.0, watch(100.0, waits, |_, _| ()));
}

#[test]
fn time_in_which_the_process_was_stopped_does_not_count() {
    let mut detector = StallDetector::new(WINDOWS);
    let stuck = LivenessSample { n_waiting: 1, n_running: 0, deadline_s: 2.0, ..IDLE };
    assert_eq!(detector.poll(&stuck, 0.0), None);
    assert_eq!(detector.poll(&stuck, 10_000.0), None, "the process was stopped");
    assert_eq!(detector.poll(&stuck, 10_004.0), None, "one second of these counts, and one of those before");
    let found = (0..20).find_map(|i| detector.poll(&stuck, 10_004.0 + f64::from(i) * PERIOD_S));
    assert_eq!(found, Some(StallReason::NothingAdmitted));
    // A clock that goes backwards adds no time.
    assert_eq!(StallDetector::new(WINDOWS).poll(&IDLE, -5.0), None);
}

#[test]
fn stall_reasons_have_codes_and_names() {
    for (code, name) in [(1, "V1"), (2, "V2"), (3, "V3"), (4, "V4"), (5, "V5")] {
        let reason = StallReason::from_code(code).unwrap();
        assert_eq!((reason as u8, reason.name()), (code, name));
    }
    assert_eq!((StallReason::from_code(0), StallReason::from_code(6)), (None, None));
}

/// An engine in which each counter moves within its window never stalls.
#[test]
fn progress_within_every_window_is_never_a_stall() {
    let spans = prop::collection::vec((0.25_f64..4.9, 0_u64..3, any::<bool>()), 1..200);
    crate::seeded::check(300, spans, |spans| {
        let mut detector = StallDetector::new(WINDOWS);
        let (mut now_s, mut sample) = (0.0, IDLE);
        for (span_s, n_running, in_step) in spans {
            sample.n_running = n_running;
            sample.n_waiting = 1;
            sample.n_beats += 1;
            sample.deadline_s = now_s + 1.0;
            sample.progress.n_steps_begun += 1;
            sample.progress.n_steps_ended = sample.progress.n_steps_begun - u64::from(in_step);
            sample.progress.n_rows_committed += 1;
            sample.progress.n_sequences_acquired += 1;
            let end_s = now_s + span_s;
            while now_s < end_s {
                prop_assert_eq!(detector.poll(&sample, now_s), None);
                now_s += PERIOD_S;
            }
        }
        Ok(())
    });
}
