use super::*;

/// Every interleaving of three threads, two of which come twice: nobody meets anybody inside.
#[cfg(loom)]
#[test]
fn nobody_meets_anybody_inside() {
    use loom::sync::Arc;
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let gate = Arc::new(OwnerGate::new());
        let within = Arc::new(loom::cell::UnsafeCell::new(0u32));
        let visit = |gate: &OwnerGate, within: &loom::cell::UnsafeCell<u32>, me: usize| {
            let entry = gate.enter(me);
            // Loom finds two at once here.
            within.with_mut(|count| {
                // SAFETY: whoever has come in is alone, which is what is tested.
                unsafe { *count += 1 }
            });
            if let Entry::Owner = entry {
                gate.leave();
            }
        };
        let others: Vec<_> = [2, 3]
            .into_iter()
            .map(|me| {
                let (gate, within) = (gate.clone(), within.clone());
                loom::thread::spawn(move || visit(&gate, &within, me))
            })
            .collect();
        visit(&gate, &within, 1);
        visit(&gate, &within, 1);
        others.into_iter().for_each(|other| other.join().unwrap());
        // SAFETY: the others are gone.
        within.with(|count| assert_eq!(unsafe { *count }, 4));
    });
}

#[cfg(not(loom))]
#[test]
fn counts_of_many_threads_add_up() {
    for (threads, rounds) in [(1u64, 1_000_000u64), (2, 200_000), (4, 100_000)] {
        let lock = OwnerLock::new((0u64, 0u64));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let mut both = lock.lock();
                        both.0 += 1;
                        both.1 += 1;
                        assert_eq!(both.0, both.1);
                    }
                });
            }
        });
        assert_eq!(lock.lock().0, threads * rounds);
    }
}

#[cfg(not(loom))]
#[test]
fn it_goes_from_hand_to_hand() {
    let lock = std::sync::Arc::new(OwnerLock::new(0));
    for round in 0..20 {
        let other = lock.clone();
        let seen = std::thread::spawn(move || {
            let mut value = other.lock();
            *value += 1;
            *value
        });
        assert_eq!(seen.join().unwrap(), 2 * round + 1);
        *lock.lock() += 1;
    }
}
