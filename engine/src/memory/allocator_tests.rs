//! Tests of the extent allocator: against a plain bitmap, by hand, and under long churn.

use super::*;
use proptest::prelude::*;

/// The plainest allocator there can be: a flag per granule. It says which runs are free, and so what best fit
/// has to do.
struct Model {
    used: Vec<bool>,
    granules_per_block: usize,
    /// By block: whether allocations may be made from it.
    open: Vec<bool>,
    /// By block: whether there is memory behind it.
    mapped: Vec<bool>,
}

impl Model {
    fn new(block_count: u32, block_count_max: u32, granules_per_block: u32) -> Self {
        let there: Vec<bool> = (0..block_count_max).map(|block| block < block_count).collect();
        Model {
            used: vec![false; (block_count_max * granules_per_block) as usize],
            granules_per_block: granules_per_block as usize,
            open: there.clone(),
            mapped: there,
        }
    }

    fn used_in(&self, block: usize) -> usize {
        let granules = block * self.granules_per_block..(block + 1) * self.granules_per_block;
        self.used[granules].iter().filter(|&&used| used).count()
    }

    fn state(&self, block: usize) -> BlockState {
        match (self.mapped[block], self.open[block], self.used_in(block)) {
            (false, ..) => BlockState::Absent,
            (true, true, _) => BlockState::Present,
            (true, false, 0) => BlockState::Retired,
            (true, false, _) => BlockState::Retiring,
        }
    }

    fn free_runs(&self) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        let free = |&granule: &usize| !self.used[granule] && self.open[granule / self.granules_per_block];
        for granule in (0..self.used.len()).filter(free) {
            match runs.last_mut() {
                Some(run) if run.end() as usize == granule && granule % self.granules_per_block != 0 => {
                    run.len += 1;
                }
                _ => runs.push(Extent { start: granule as u32, len: 1 }),
            }
        }
        runs
    }

    /// Lengths of the runs that best fit with the fewest extents has to draw on, in order.
    fn expected_runs(&self, granules: u32) -> Option<Vec<u32>> {
        let mut lengths: Vec<u32> = self.free_runs().iter().map(|run| run.len).collect();
        let mut rest = granules;
        let mut taken = Vec::new();
        while rest > 0 {
            let fit = lengths.iter().copied().filter(|&length| length >= rest).min();
            let length = fit.or(lengths.iter().copied().max())?;
            lengths.swap_remove(lengths.iter().position(|&other| other == length)?);
            taken.push(length);
            rest = rest.saturating_sub(length);
        }
        Some(taken)
    }

    /// Marks an extent, checks that it was all of the other kind.
    fn set(&mut self, extent: Extent, used: bool) {
        let first_block = extent.start as usize / self.granules_per_block;
        let last_block = (extent.end() as usize - 1) / self.granules_per_block;
        assert_eq!(first_block, last_block, "{extent:?} crosses a border");
        for granule in extent.start..extent.end() {
            assert_ne!(self.used[granule as usize], used, "granule {granule} of {extent:?}");
            self.used[granule as usize] = used;
        }
    }

    /// Length of the free run that contains `granule`.
    fn run_at(&self, granule: u32) -> u32 {
        let holds = |run: &&Extent| (run.start..run.end()).contains(&granule);
        self.free_runs().iter().find(holds).map_or(0, |run| run.len)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u32),
    Free(usize),
    FreePart(usize, u32),
    Add,
    Retire(u32),
    Keep,
    TakeRetired,
}

fn steps(granules_per_block: u32) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..=granules_per_block).prop_map(Step::Allocate),
        3 => (0..=granules_per_block / 4).prop_map(Step::Allocate),
        1 => (0..=granules_per_block * 3).prop_map(Step::Allocate),
        5 => any::<usize>().prop_map(Step::Free),
        1 => (any::<usize>(), any::<u32>()).prop_map(|(which, at)| Step::FreePart(which, at)),
        1 => Just(Step::Add),
        1 => any::<u32>().prop_map(Step::Retire),
        1 => prop_oneof![Just(Step::Keep), Just(Step::TakeRetired)],
    ];
    prop::collection::vec(step, 1..120)
}

fn allocate_and_compare(
    allocator: &mut ExtentAllocator,
    model: &mut Model,
    granules: u32,
) -> Option<ExtentList> {
    let expected = if granules <= allocator.free_granules() { model.expected_runs(granules) } else { None };
    let extents = allocator.allocate(granules);
    match (&extents, expected) {
        (None, None) => {}
        (Some(extents), Some(expected)) => {
            assert_eq!(extents.granules(), granules);
            assert_eq!(extents.len(), expected.len(), "{extents:?} instead of runs {expected:?}");
            for (extent, run_len) in extents.iter().zip(expected) {
                assert_eq!(model.run_at(extent.start), run_len, "{extent:?} is not the best fit");
                model.set(*extent, true);
            }
        }
        (extents, expected) => panic!("{extents:?} instead of runs {expected:?}"),
    }
    extents
}

/// A step that adds or takes out blocks, on both.
fn change_blocks(allocator: &mut ExtentAllocator, model: &mut Model, step: &Step) {
    match step {
        Step::Add => {
            let first = model.mapped.iter().position(|&mapped| !mapped);
            assert_eq!(allocator.first_absent(), first.map(|block| block as u32));
            if let Some(block) = first {
                allocator.add(block as u32);
                (model.mapped[block], model.open[block]) = (true, true);
            }
        }
        Step::Retire(which) => {
            let open: Vec<usize> = (0..model.open.len()).filter(|&block| model.open[block]).collect();
            // At least one block stays, as in an arena.
            if open.len() > 1 {
                let block = open[*which as usize % open.len()];
                allocator.retire(block as u32);
                model.open[block] = false;
            }
        }
        Step::Keep => {
            let out = |model: &Model, block: usize| model.mapped[block] && !model.open[block];
            let before: Vec<usize> = (0..model.open.len()).filter(|&block| out(model, block)).collect();
            assert_eq!(allocator.keep_one(), !before.is_empty());
            let kept = |&&block: &&usize| allocator.block_state(block as u32) == BlockState::Present;
            if let Some(&block) = before.iter().find(kept) {
                let free = |&block: &usize| model.used_in(block) == 0;
                assert!(free(&block) || !before.iter().any(free), "a wholly free block is kept first");
                model.open[block] = true;
            } else {
                assert!(before.is_empty());
            }
        }
        _ => match allocator.take_retired() {
            Some(block) => {
                assert_eq!(model.state(block as usize), BlockState::Retired);
                model.mapped[block as usize] = false;
            }
            None => assert!((0..model.open.len()).all(|block| model.state(block) != BlockState::Retired)),
        },
    }
}

fn run_against_model(block_count: u32, spare: u32, granules_per_block: u32, steps: Vec<Step>) {
    let block_count_max = block_count + spare;
    let mut allocator = ExtentAllocator::with_room(block_count, block_count_max, granules_per_block);
    let mut model = Model::new(block_count, block_count_max, granules_per_block);
    let mut held: Vec<Vec<Extent>> = Vec::new();
    for step in steps {
        match step {
            Step::Allocate(granules) => {
                held.extend(
                    allocate_and_compare(&mut allocator, &mut model, granules).map(|list| list.to_vec()),
                );
            }
            Step::Free(which) if !held.is_empty() => {
                let extents = held.swap_remove(which % held.len());
                extents.iter().for_each(|extent| model.set(*extent, false));
                allocator.free(&extents);
            }
            Step::FreePart(which, at) if !held.is_empty() => {
                // A value that turned out shorter gives back the tail of its last extent.
                let which = which % held.len();
                if let Some(last) = held[which].last_mut().filter(|last| last.len > 1) {
                    let keep = 1 + at % (last.len - 1);
                    let tail = Extent { start: last.start + keep, len: last.len - keep };
                    last.len = keep;
                    model.set(tail, false);
                    allocator.free(&[tail]);
                }
            }
            Step::Free(_) | Step::FreePart(..) => {}
            blocks => change_blocks(&mut allocator, &mut model, &blocks),
        }
        allocator.validate();
        for block in 0..block_count_max {
            assert_eq!(allocator.block_state(block), model.state(block as usize), "block {block}");
            assert_eq!(allocator.used_in_block(block) as usize, model.used_in(block as usize));
        }
        assert_eq!(allocator.used_granules() as usize, model.used.iter().filter(|&&used| used).count());
        let runs = model.free_runs();
        assert_eq!(allocator.fragments(), runs.len());
        assert_eq!(allocator.free_granules(), runs.iter().map(|run| run.len).sum::<u32>());
        assert_eq!(allocator.largest_free(), runs.iter().map(|run| run.len).max().unwrap_or(0));
    }
    held.iter().for_each(|extents| allocator.free(extents));
    allocator.validate();
    assert_eq!(allocator.retiring_blocks(), 0, "what retires is retired when all is freed");
    assert_eq!(allocator.free_granules(), allocator.total_granules());
    assert_eq!(allocator.fragments(), allocator.present_blocks() as usize);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn equals_the_plain_bitmap((block_count, spare, granules_per_block, steps) in
        (1u32..6, 0u32..3, prop_oneof![Just(1u32), Just(16), 2u32..40, Just(64), Just(128)])
            .prop_flat_map(|(blocks, spare, granules)| (Just(blocks), Just(spare), Just(granules), steps(granules))))
    {
        run_against_model(block_count, spare, granules_per_block, steps);
    }
}

#[test]
fn a_block_retires_with_its_last_granule() {
    let mut allocator = ExtentAllocator::with_room(2, 3, 64);
    let first = allocator.allocate(60).unwrap();
    let across = allocator.allocate(66).unwrap();
    assert_eq!(allocator.free_granules(), 2);
    allocator.retire(0);
    assert_eq!((allocator.block_state(0), allocator.total_granules()), (BlockState::Retiring, 64));
    let free = allocator.free_granules();
    assert!(allocator.allocate(free + 1).is_none(), "nothing comes from a retiring block");
    allocator.free(&first);
    assert_eq!(allocator.take_retired(), None, "a part of the other value is there");
    allocator.free(&across);
    assert_eq!((allocator.block_state(0), allocator.retired_blocks()), (BlockState::Retired, 1));
    assert_eq!(allocator.take_retired(), Some(0));
    allocator.validate();
    assert_eq!((allocator.first_absent(), allocator.free_granules()), (Some(0), 64));
    allocator.add(0);
    allocator.add(2);
    assert_eq!((allocator.first_absent(), allocator.free_granules()), (None, 192));
    allocator.validate();
}

#[test]
#[should_panic(expected = "is no extent of an arena")]
fn freeing_in_an_absent_block_is_caught() {
    ExtentAllocator::with_room(1, 2, 64).free(&[Extent { start: 64, len: 1 }]);
}

#[test]
fn a_new_allocator_is_one_run_per_block() {
    let allocator = ExtentAllocator::new(23, 4096);
    allocator.validate();
    assert_eq!(allocator.total_granules(), 23 * 4096);
    assert_eq!(allocator.free_granules(), 23 * 4096);
    assert_eq!(allocator.largest_free(), 4096);
    assert_eq!(allocator.fragments(), 23);
}

#[test]
fn values_larger_than_a_block_span_blocks_in_few_extents() {
    let mut allocator = ExtentAllocator::new(4, 4096);
    let extents = allocator.allocate(2 * 4096 + 10).unwrap();
    assert_eq!(extents.iter().map(|extent| extent.len).collect::<Vec<_>>(), [4096, 4096, 10]);
    assert!(allocator.allocate(2 * 4096 - 9).is_none(), "one granule more than there is");
    allocator.validate();
    let rest = allocator.allocate(2 * 4096 - 10).unwrap();
    assert_eq!(rest.len(), 2);
    assert_eq!((allocator.free_granules(), allocator.largest_free(), allocator.fragments()), (0, 0, 0));
    assert!(allocator.allocate(0).unwrap().is_empty(), "an empty value fits into a full arena");
    assert!(allocator.allocate(1).is_none());
    allocator.free(&extents);
    allocator.free(&rest);
    allocator.validate();
    assert_eq!(allocator.fragments(), 4);
}

#[test]
fn values_of_the_usual_sizes_fill_the_arena() {
    // 400 MB hold 23 blocks of 16 MiB: 38 values of 10 MB, 30 of 12.5 MB; 800 MB hold 47: 31 of 25 MB.
    for (blocks, value_bytes, at_least) in
        [(23, 10_000_000, 38), (23, 12_500_000, 30), (47, 25_000_000, 31), (4, 4_000, 15_000)]
    {
        let granules = crate::memory::granules_for(value_bytes) as u32;
        let mut allocator = ExtentAllocator::new(blocks, 4096);
        let values = std::iter::from_fn(|| allocator.allocate(granules)).count();
        assert!(values >= at_least, "{values} values of {value_bytes} bytes in {blocks} blocks");
        assert!(allocator.free_granules() < granules);
    }
}

#[test]
fn a_million_operations_leave_nothing_behind() {
    let blocks = 64;
    let mut allocator = ExtentAllocator::new(blocks, 4096);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        // xorshift64: Marsaglia, "Xorshift RNGs", 2003.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut held: Vec<ExtentList> = Vec::new();
    let mut refused = 0;
    for operation in 0..1_000_000u32 {
        if next() % 2 == 0 || held.is_empty() {
            let granules = 1 + (next() % 6000) as u32;
            match allocator.allocate(granules) {
                Some(extents) => {
                    assert_eq!(extents.granules(), granules);
                    held.push(extents);
                }
                None => {
                    refused += 1;
                    assert!(allocator.free_granules() < granules, "refused although there was room");
                }
            }
        } else {
            let which = next() as usize % held.len();
            allocator.free(&held.swap_remove(which));
        }
        if operation % 50_000 == 0 {
            allocator.validate();
        }
    }
    assert!(refused > 1000, "the churn never filled the arena: refused {refused} times");
    held.iter().for_each(|extents| allocator.free(extents));
    allocator.validate();
    assert_eq!(allocator.fragments(), blocks as usize);
    assert_eq!(allocator.largest_free(), 4096);
    let whole: Vec<_> = (0..blocks).map(|_| allocator.allocate(4096).unwrap()).collect();
    assert!(whole.iter().all(|extents| extents.len() == 1), "every block is whole again");
}

/// Runs `free` on an allocator of 2 blocks of 64 granules in which granules 0 to 9 are taken.
fn free_in_small_arena(extents: &[Extent]) {
    let mut allocator = ExtentAllocator::new(2, 64);
    let taken = allocator.allocate(10).unwrap();
    assert_eq!(*taken, [Extent { start: 0, len: 10 }]);
    allocator.free(extents);
}

#[test]
#[should_panic(expected = "free (wholly or in part) already")]
fn freeing_twice_is_caught() {
    free_in_small_arena(&[Extent { start: 0, len: 10 }, Extent { start: 0, len: 10 }]);
}

#[test]
#[should_panic(expected = "free (wholly or in part) already")]
fn freeing_more_than_was_taken_is_caught() {
    free_in_small_arena(&[Extent { start: 0, len: 11 }]);
}

#[test]
#[should_panic(expected = "is no extent of an arena")]
fn freeing_across_a_border_is_caught() {
    free_in_small_arena(&[Extent { start: 60, len: 8 }]);
}

#[test]
#[should_panic(expected = "is no extent of an arena")]
fn freeing_outside_the_arena_is_caught() {
    free_in_small_arena(&[Extent { start: 128, len: 1 }]);
}

#[test]
#[should_panic(expected = "is no extent of an arena")]
fn freeing_nothing_is_caught() {
    free_in_small_arena(&[Extent { start: 0, len: 0 }]);
}

#[test]
#[should_panic(expected = "is no extent of an arena")]
fn freeing_a_length_that_overflows_is_caught() {
    free_in_small_arena(&[Extent { start: 5, len: u32::MAX }]);
}
