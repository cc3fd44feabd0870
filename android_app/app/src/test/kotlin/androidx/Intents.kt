package androidx.test.runner.intent

import android.app.Instrumentation
import android.content.Intent

interface IntentMonitor

object IntentMonitorRegistry {
    @JvmStatic
    fun registerInstance(@Suppress("UNUSED_PARAMETER") monitor: IntentMonitor) = Unit
}

interface IntentStubber {
    fun getActivityResultForIntent(intent: Intent): Instrumentation.ActivityResult?
}

object IntentStubberRegistry {
    @JvmStatic
    fun isLoaded(): Boolean = false

    @JvmStatic
    fun getInstance(): IntentStubber = throw IllegalStateException("no stubber: ask isLoaded first")
}
