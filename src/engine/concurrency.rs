//! The concurrency controller, which finds the number of workers of a call. It begins with few, and
//! adds more while they raise the throughput.
//!
//! A pure function of samples, without threads or a clock.

use std::time::Duration;

/// No byte within this time means high latency: double the workers. Local servers and disks respond
/// sooner, and compared with the latency of others the wait is short.
const SILENCE: Duration = Duration::from_millis(10);
/// The shortest time over which a rate is measured: some time slices of a scheduler.
const WINDOW: Duration = Duration::from_millis(50);
/// Minimum number of arrivals per worker in a window. With fewer, its rate is a matter of chance.
const ARRIVALS: u64 = 4;
/// The longest wait for the first bytes of new workers; then the rate is measured without them. A
/// call that would end within this time gets no more workers.
const SETTLING_TIME: Duration = Duration::from_millis(200);
/// Minimum growth of the rate, in percent, that justifies doubling the workers. It exceeds the
/// usual variation between two windows.
const GAIN: u64 = 15;
/// CPU load of a window, in percent of all cores, from which on no workers are added.
const BUSY: u64 = 85;
/// Time until more workers are tried again. It doubles each time.
const PAUSE: Duration = Duration::from_secs(1);

/// The state of a call at one moment. All but `running` and `receiving` only grow.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// Time since the call began.
    pub at: Duration,
    /// Bytes that have arrived.
    pub bytes: u64,
    /// Number of arrivals, of any length.
    pub arrivals: u64,
    /// CPU time that the process has used.
    pub cpu: Duration,
    /// Workers that run now.
    pub running: usize,
    /// Running workers that have received bytes.
    pub receiving: usize,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// No byte has arrived yet. Since this time the number is the same.
    Silent(Duration),
    /// New workers begin to receive bytes. The number has changed at this time.
    Settling(Duration),
    /// The rate is measured from this sample on.
    Measuring(Sample),
    /// The number does not change before this time.
    Resting(Duration),
}

/// Finds the number of workers of one call.
#[derive(Debug)]
pub struct ConcurrencyController {
    wanted: usize,
    max_workers: usize,
    cores: usize,
    /// Bytes of the call; `u64::MAX` if unknown.
    total: u64,
    phase: Phase,
    /// The previous number of workers, half as many, and the rate that they achieved in bytes per
    /// second, while more are tried.
    before: Option<(usize, u64)>,
    pause: Duration,
}

impl ConcurrencyController {
    /// Creates a controller that begins with `first` workers, of at most `max_workers`, on `cores`
    /// CPUs.
    pub fn new(first: usize, max_workers: usize, cores: usize) -> Self {
        let max_workers = max_workers.max(1);
        ConcurrencyController {
            wanted: first.clamp(1, max_workers),
            max_workers,
            cores: cores.max(1),
            total: u64::MAX,
            phase: Phase::Silent(Duration::ZERO),
            before: None,
            pause: PAUSE,
        }
    }

    /// Sets the bytes of the call, if they are known.
    pub fn with_total_bytes(self, total: Option<u64>) -> Self {
        ConcurrencyController { total: total.unwrap_or(u64::MAX), ..self }
    }

    /// Takes a sample, and returns the number of workers that are wanted.
    pub fn update(&mut self, now: &Sample) -> usize {
        match self.phase {
            Phase::Silent(since) if now.bytes == 0 => {
                if now.at.saturating_sub(since) >= SILENCE {
                    self.wanted = self.doubled();
                    self.phase = Phase::Silent(now.at);
                }
            }
            Phase::Silent(_) => self.phase = Phase::Settling(now.at),
            Phase::Settling(since) => {
                let complete = now.running == self.wanted && now.receiving >= now.running;
                if complete || now.at.saturating_sub(since) >= SETTLING_TIME {
                    self.phase = Phase::Measuring(*now);
                }
            }
            Phase::Measuring(from) => {
                let time = now.at.saturating_sub(from.at);
                let arrivals = now.arrivals.saturating_sub(from.arrivals);
                let enough = ARRIVALS.saturating_mul(self.wanted as u64);
                if time >= WINDOW && (arrivals >= enough || time >= SETTLING_TIME) {
                    self.adjust(&from, now, time);
                }
            }
            Phase::Resting(until) if now.at >= until => self.phase = Phase::Measuring(*now),
            Phase::Resting(_) => {}
        }
        self.wanted
    }

    /// Doubles, keeps or restores the number of workers, depending on the rate of a window.
    fn adjust(&mut self, from: &Sample, now: &Sample, time: Duration) {
        let bytes = u128::from(now.bytes.saturating_sub(from.bytes));
        let rate = bytes * 1_000_000 / time.as_micros().max(1);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        let cpu = now.cpu.saturating_sub(from.cpu);
        let busy =
            cpu.as_micros() * 100 >= time.as_micros() * self.cores as u128 * u128::from(BUSY);
        if let Some((workers, before)) = self.before.take()
            && u128::from(rate) * 100 < u128::from(before) * u128::from(100 + GAIN)
        {
            self.wanted = workers;
            return self.pause(now.at);
        }
        // If the call ends soon, more workers would not bring much.
        let remaining = u128::from(self.total.saturating_sub(now.bytes));
        let ending = remaining * 1_000_000 < u128::from(rate) * SETTLING_TIME.as_micros();
        if busy || ending || self.wanted == self.max_workers {
            return self.pause(now.at);
        }
        self.before = Some((self.wanted, rate));
        self.wanted = self.doubled();
        self.phase = Phase::Settling(now.at);
    }

    fn pause(&mut self, now: Duration) {
        self.phase = Phase::Resting(now.saturating_add(self.pause));
        self.pause = self.pause.saturating_mul(2);
    }

    fn doubled(&self) -> usize {
        self.wanted.saturating_mul(2).min(self.max_workers)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    /// A source that responds after a while, and then delivers at a rate that depends on the number
    /// of workers.
    struct SimulatedSource<R: Fn(usize) -> f64> {
        latency: Duration,
        rate: R,
        /// CPUs that are busy.
        busy: f64,
    }

    impl<R: Fn(usize) -> f64> SimulatedSource<R> {
        /// Returns the number of wanted workers, every 5 ms. Wanted workers start at once, and
        /// receive their first bytes after the latency.
        fn run(&self, controller: &mut ConcurrencyController, seconds: u64) -> Vec<usize> {
            let (tick, mut now) = (Duration::from_millis(5), Sample::default());
            let (mut bytes, mut started, mut counts) = (0.0, Vec::new(), Vec::new());
            for _ in 0..seconds * 200 {
                let wanted = controller.update(&now);
                started.resize(wanted, now.at);
                counts.push(wanted);
                now.at += tick;
                now.running = wanted;
                now.receiving = started.iter().filter(|&&at| at + self.latency <= now.at).count();
                bytes += (self.rate)(now.receiving) * tick.as_secs_f64();
                now.bytes = bytes as u64;
                now.arrivals += 4 * now.receiving as u64;
                now.cpu += tick.mul_f64(self.busy);
            }
            counts
        }
    }

    /// Returns the most frequent number.
    fn most_frequent(counts: &[usize]) -> usize {
        let mut times = BTreeMap::new();
        counts.iter().for_each(|&number| *times.entry(number).or_insert(0) += 1);
        times.into_iter().max_by_key(|&(_, times)| times).map_or(0, |(number, _)| number)
    }

    #[test]
    fn a_call_that_is_about_to_end_gets_no_more_workers() {
        // 10 MB/s per worker: after the first window, half a second is left, or a tenth of a
        // second.
        let source =
            SimulatedSource { latency: Duration::ZERO, rate: |n| n as f64 * 1e7, busy: 0.0 };
        for (total, max_workers) in [(20_000_000, 8), (6_000_000, 4)] {
            let mut controller = ConcurrencyController::new(4, 64, 2).with_total_bytes(Some(total));
            assert_eq!(
                source.run(&mut controller, 1).into_iter().take(40).max(),
                Some(max_workers)
            );
        }
    }

    #[test]
    fn high_latency_doubles_workers_before_the_first_byte() {
        let source = SimulatedSource {
            latency: Duration::from_millis(50),
            rate: |n| n as f64 * 1e8,
            busy: 0.3,
        };
        let counts = source.run(&mut ConcurrencyController::new(4, 64, 2), 2);
        assert_eq!(counts.get(7), Some(&32), "{counts:?}");
        assert_eq!(counts.last(), Some(&64));
    }

    #[test]
    fn busy_cpus_get_no_more_workers() {
        let source =
            SimulatedSource { latency: Duration::ZERO, rate: |n| n as f64 * 1e9, busy: 1.9 };
        let counts = source.run(&mut ConcurrencyController::new(2, 64, 2), 5);
        assert!(counts.iter().all(|&wanted| wanted == 2), "{counts:?}");
        // On a machine with more cores, two busy workers leave room for others.
        let counts = source.run(&mut ConcurrencyController::new(2, 64, 16), 5);
        assert_eq!(counts.last(), Some(&64));
    }

    #[test]
    fn unhelpful_workers_are_retired_and_retried_less_often() {
        for rate in [|_: usize| 1e9, |n: usize| 4e9 / n as f64] {
            let source = SimulatedSource { latency: Duration::ZERO, rate, busy: 0.5 };
            let counts = source.run(&mut ConcurrencyController::new(4, 64, 2), 30);
            assert!(counts.iter().all(|wanted| [4, 8].contains(wanted)), "{counts:?}");
            let more = counts.iter().filter(|&&wanted| wanted == 8).count();
            assert!(more * 20 < counts.len(), "{more} of {}", counts.len());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn workers_stop_growing_where_doubling_stops_helping(limit in 4usize..200, latency in 0u64..10) {
            let latency = Duration::from_millis(latency);
            let source = SimulatedSource { latency, rate: |n| n.min(limit) as f64 * 1e8, busy: 0.3 };
            let number = most_frequent(&source.run(&mut ConcurrencyController::new(4, 64, 2), 10));
            prop_assert!(number == 64 || number * 115 >= limit * 100, "{number}");
            prop_assert!(number == 4 || number / 2 * 115 <= limit * 100, "{number}");
        }

        #[test]
        fn worker_count_stays_within_its_bounds(
            first in 0usize..100,
            max_workers in 0usize..100,
            samples in proptest::collection::vec(any::<[u32; 6]>(), 0..200),
        ) {
            let mut controller = ConcurrencyController::new(first, max_workers, 0);
            let mut now = Sample::default();
            for [at, bytes, arrivals, cpu, running, receiving] in samples {
                now.at += Duration::from_micros(u64::from(at >> 8));
                now.bytes += u64::from(bytes);
                now.arrivals += u64::from(arrivals >> 24);
                now.cpu += Duration::from_micros(u64::from(cpu >> 8));
                now.running = running as usize % 128;
                now.receiving = receiving as usize % 128;
                let wanted = controller.update(&now);
                prop_assert!((1..=max_workers.max(1)).contains(&wanted));
            }
        }
    }
}
