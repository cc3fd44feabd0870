package org.ondevice.app

import android.os.CancellationSignal
import android.os.Handler
import android.os.Looper
import org.ondevice.core.ErrorKind
import org.ondevice.core.OndeviceException
import java.util.concurrent.Executor
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors

/** Whoever wants to hear, on the main thread, that something has changed. */
open class Watched {
    private val watchers = LinkedHashSet<() -> Unit>()

    fun watch(watcher: () -> Unit) {
        watchers.add(watcher)
    }

    fun unwatch(watcher: () -> Unit) {
        watchers.remove(watcher)
    }

    fun changed() = watchers.toList().forEach { it() }
}

/**
 * Work that takes longer than a frame, one piece after another on one thread; it goes on while the screen rotates.
 * Screens are told on the main thread when what they show has changed.
 */
class Jobs : Watched() {
    private val thread: ExecutorService = Executors.newSingleThreadExecutor { Thread(it, "ondevice-work") }
    private val main = Handler(Looper.getMainLooper())

    private class Work(val words: String, val signal: CancellationSignal?)

    /** What is being done, by the place that shows it. Main thread only. */
    private val running = LinkedHashMap<String, Work>()

    /** The last error of a place, until it is dismissed or the next work there starts. */
    private val errors = LinkedHashMap<String, OndeviceException>()

    /** What is being done at a place, in words; null when nothing is. */
    fun words(place: String): String? = running[place]?.words

    fun canCancel(place: String): Boolean = running[place]?.signal != null

    /** End what is being done at a place, if it can be cancelled; nothing is heard of it any more. */
    fun cancel(place: String) {
        val signal = running[place]?.signal ?: return
        running.remove(place)
        signal.cancel()
        changed()
    }

    fun error(place: String): OndeviceException? = errors[place]

    fun fail(place: String, error: OndeviceException) {
        errors[place] = error
        changed()
    }

    fun dismiss(place: String) {
        if (errors.remove(place) != null) changed()
    }

    /** Run [work]; then [done] with what it gave, on the main thread. An error is shown at [place]. */
    fun <T> run(place: String, words: String, work: () -> T, done: (T) -> Unit = {}) = start(thread, place, Work(words, null), work, done)

    /** Do as [run], for work that [signal] cancels; [aside] of all other work, if what holds it up is not the user's. */
    fun <T> run(place: String, words: String, signal: CancellationSignal, aside: Boolean, work: () -> T, done: (T) -> Unit) {
        val executor = if (aside) Executor { Thread(it, "ondevice-aside").start() } else thread
        start(executor, place, Work(words, signal), work, done)
    }

    private fun <T> start(executor: Executor, place: String, now: Work, work: () -> T, done: (T) -> Unit) {
        running[place] = now
        errors.remove(place)
        changed()
        executor.execute {
            val result = try {
                Result.success(work())
            } catch (error: Throwable) {
                Result.failure(plain(error))
            }
            main.post {
                if (running[place] === now) running.remove(place)
                if (now.signal?.isCanceled != true) result.onSuccess(done).onFailure { errors[place] = it as OndeviceException }
                changed()
            }
        }
    }

    /** Do [action] on the main thread. */
    fun onMain(action: () -> Unit) {
        if (Looper.myLooper() == Looper.getMainLooper()) action() else main.post(action)
    }

    companion object {
        /** Any failure as one that a person can act on. */
        fun plain(error: Throwable): OndeviceException = when (error) {
            is OndeviceException -> error
            is OutOfMemoryError -> OndeviceException(
                ErrorKind.STORAGE, "the app ran out of memory", null, error.message, "close other apps, or use a smaller model", error,
            )
            is java.io.IOException -> OndeviceException(
                ErrorKind.STORAGE, "a file could not be read or written", null, error.message, "free some storage and try again", error,
            )
            is SecurityException -> OndeviceException(
                ErrorKind.STORAGE, "the system did not let the app read what was picked", null, error.message, "pick it again", error,
            )
            else -> OndeviceException(
                ErrorKind.TRAINING, "something failed that the app did not expect", null, error.toString(), "try again; if it happens again, report it", error,
            )
        }
    }
}
