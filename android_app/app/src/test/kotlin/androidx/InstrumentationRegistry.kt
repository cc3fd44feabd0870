// Google's androidx.test cannot be had from Maven Central, and Robolectric calls a handful of its classes when it
// starts a test. These files are that handful, written for these tests; nothing of androidx goes into the app.
package androidx.test.platform.app

import android.app.Instrumentation
import android.os.Bundle

object InstrumentationRegistry {
    private var instrumentation: Instrumentation? = null
    private var arguments = Bundle()

    @JvmStatic
    fun getInstrumentation(): Instrumentation =
        instrumentation ?: throw IllegalStateException("no instrumentation registered: Robolectric registers one")

    @JvmStatic
    fun getArguments(): Bundle = Bundle(arguments)

    @JvmStatic
    fun registerInstance(instrumentation: Instrumentation?, arguments: Bundle?) {
        this.instrumentation = instrumentation
        this.arguments = Bundle(arguments ?: Bundle())
    }
}
