from tilewise_lab.learn import compare, expect


def registers(answer):
    for consumers, producer in ((2, 24), (3, 32), (1, 40)):
        rest = 65536 - 128 * producer
        compare(
            f"registers({consumers}, {producer})",
            answer.registers(consumers, producer),
            rest // (128 * consumers) // 8 * 8,
            (
                65536 // (128 * consumers),
                "the producer's registers are missing: 128 threads take them",
                "漏了生产者的寄存器：它的 128 个线程也要占用",
            ),
            (
                rest // (128 * consumers),
                "not a multiple of 8: round down",
                "不是 8 的倍数：要向下取整",
            ),
            (
                (65536 - producer) // (128 * consumers) // 8 * 8,
                "the producer has 128 threads, each with its registers",
                "生产者有 128 个线程，每个都要占用寄存器",
            ),
            (
                rest // 128 // 8 * 8,
                "this is for one consumer warpgroup: the consumers share the registers",
                "这是只有一个消费者时的数：各消费者要平分寄存器",
            ),
        )


def phases(answer):
    for buffers in (2, 1, 3, 4):
        for iteration in range(4 * buffers):
            buffer, full, empty = answer.phases(iteration, buffers)
            turn = iteration // buffers
            where = f"phases({iteration}, {buffers})"
            compare(
                f"{where}: buffer",
                buffer,
                iteration % buffers,
                (
                    turn,
                    "this is how often the ring was used: the buffer is iteration % buffers",
                    "这是用过几圈：缓冲区是 iteration % buffers",
                ),
            )
            compare(
                f"{where}: full",
                full,
                turn % 2,
                (
                    iteration % 2,
                    "the phase flips with every use of the *same* buffer: iteration // buffers % 2",
                    "相位随*同一个*缓冲区的每次使用翻转：iteration // buffers % 2",
                ),
                (
                    0,
                    f"fill {turn + 1} of this buffer completes phase {turn % 2}: phases alternate",
                    f"这个缓冲区的第 {turn + 1} 次填充完成的是相位 {turn % 2}：相位交替",
                ),
                (
                    1 - turn % 2,
                    "this is the phase before: the consumer waits for the fill of this iteration",
                    "这是前一个相位：消费者等待的是这次迭代的填充",
                ),
            )
            expect(
                empty != full,
                f"{where}: the producer waits for the release *before* this fill, the other phase; with the same phase its first wait never returns",
                f"{where}：生产者等待的是这次填充*之前*的释放，即另一个相位；用同一个相位的话，第一次等待永远不会返回",
            )
            compare(f"{where}: empty", empty, 1 - turn % 2)


def time(n, buffers, load, compute):
    loaded, done = 0, []
    for i in range(n):
        free = done[i - buffers] if i >= buffers else 0
        loaded = max(loaded, free) + load
        done.append(max(loaded, done[-1] if done else 0) + compute)
    return done[-1]


def ring_time(answer):
    for n, buffers, load, compute in (
        (4, 1, 3, 5),
        (6, 2, 3, 5),
        (6, 2, 5, 3),
        (8, 3, 4, 4),
        (1, 2, 3, 4),
    ):
        compare(
            f"ring_time({n}, {buffers}, {load}, {compute})",
            answer.ring_time(n, buffers, load, compute),
            time(n, buffers, load, compute),
            (
                time(n, n, load, compute),
                "the producer never waits: a buffer is free once its tile has been computed",
                "生产者从不等待：缓冲区里的块算完之后才空闲",
            ),
            (
                n * (load + compute),
                "nothing overlaps: the next tile is loaded while this one is computed",
                "毫无重叠：计算这一块时，下一块已经在读入",
            ),
            (
                max(n * load, n * compute),
                "the first load, or the last computation, overlaps with nothing: add it",
                "第一次读入或最后一次计算没有可重叠的：要加上",
            ),
        )


EXERCISES = (registers, phases, ring_time)
