package org.ondevice.app

import android.os.CancellationSignal
import android.os.OperationCanceledException
import org.ondevice.core.ErrorKind
import org.ondevice.core.OndeviceException
import java.io.Closeable
import java.io.InputStream
import java.util.concurrent.CancellationException
import java.util.concurrent.ExecutionException
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.Semaphore
import java.util.concurrent.ThreadFactory
import java.util.concurrent.ThreadPoolExecutor
import java.util.concurrent.TimeUnit
import java.util.concurrent.TimeoutException

/**
 * Calls into another app's provider, which may answer late or never.
 *
 * A thread of its own makes the calls. Whoever waits for them gives up after [limitMs] without an answer, or when
 * [signal] is cancelled. The thread stays until the other app lets it go; [threads] limits how many there are.
 */
class Foreign(val signal: CancellationSignal, private val limitMs: Long, private val threads: Semaphore) : Closeable {
    private val caller: ThreadPoolExecutor
    private val opened = ArrayList<InputStream>()

    @Volatile private var isStuck = false

    init {
        signal.throwIfCanceled()
        if (!threads.tryAcquire()) {
            throw OndeviceException(
                ErrorKind.STORAGE, "other apps still owe this app an answer", null, null, "close the app that the file is from, and try again",
            )
        }
        val factory = ThreadFactory { Thread(it, "ondevice-foreign").apply { isDaemon = true } }
        caller = object : ThreadPoolExecutor(1, 1, 0L, TimeUnit.SECONDS, LinkedBlockingQueue(), factory) {
            override fun terminated() = threads.release()
        }
    }

    /** What [call] gives. */
    fun <T> ask(call: () -> T): T = ask(limitMs, call)

    /** A stream whose every read ends in time: [FLOOR_BYTES] have to arrive in each [limitMs]. */
    fun stream(open: () -> InputStream): InputStream {
        val source = ask { open().also { if (isStuck || signal.isCanceled) it.close() } }
        opened.add(source)
        return Guarded(source)
    }

    private fun <T> ask(waitMs: Long, call: () -> T): T {
        signal.throwIfCanceled()
        if (waitMs <= 0 || isStuck) throw silent()
        val task = caller.submit(java.util.concurrent.Callable(call))
        signal.setOnCancelListener { task.cancel(true) }
        try {
            return task.get(waitMs, TimeUnit.MILLISECONDS)
        } catch (_: CancellationException) {
            isStuck = true
            throw OperationCanceledException()
        } catch (_: TimeoutException) {
            isStuck = true
            task.cancel(true)
            throw silent()
        } catch (error: ExecutionException) {
            throw error.cause ?: error
        } finally {
            signal.setOnCancelListener(null)
        }
    }

    private fun silent() = OndeviceException(
        ErrorKind.STORAGE, "the app that the file is from does not answer", "an answer within ${limitMs / 1000} s", null, "copy the file to this phone first, and pick the copy",
    )

    /** Let the thread end. A stream is closed by the thread, or if that is held up by another one: this may free it. */
    override fun close() {
        val close = Runnable { opened.forEach { stream -> runCatching { stream.close() } } }
        if (isStuck) Thread(close, "ondevice-foreign-close").apply { isDaemon = true }.start() else caller.execute(close)
        caller.shutdown()
    }

    private inner class Guarded(private val source: InputStream) : InputStream() {
        private val buffer = ByteArray(CHUNK_BYTES)
        private var low = 0
        private var high = 0
        private var since = System.nanoTime()
        private var arrived = 0

        override fun read(): Int = ByteArray(1).let { if (read(it, 0, 1) < 0) -1 else it[0].toInt() and 0xff }

        override fun read(into: ByteArray, offset: Int, length: Int): Int {
            if (length == 0) return 0
            if (low == high && !fill()) return -1
            val count = minOf(length, high - low)
            System.arraycopy(buffer, low, into, offset, count)
            low += count
            return count
        }

        private fun fill(): Boolean {
            val count = ask(limitMs - (System.nanoTime() - since) / 1_000_000) { source.read(buffer) }
            low = 0
            high = maxOf(count, 0)
            arrived += high
            if (arrived >= FLOOR_BYTES) {
                since = System.nanoTime()
                arrived = 0
            }
            return count >= 0
        }

        override fun close() = ask { source.close() }
    }

    companion object {
        /** How long another app may take for an answer. */
        const val LIMIT_MS = 30_000L
        const val FLOOR_BYTES = 4096
        private const val CHUNK_BYTES = 1 shl 16

        /** Threads for what the user picked, and for what other apps sent without being asked. */
        val PICKED = Semaphore(8)
        val SENT = Semaphore(4)
    }
}
